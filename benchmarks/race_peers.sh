#!/usr/bin/env bash
# Install MACE, NequIP, PET and DeePMD-kit, each in a virtual environment of its own, for race.py.
#   usage: race_peers.sh DIR
set -euo pipefail
dir=${1:?usage: race_peers.sh DIR}
torch=torch==2.13.0

install() {
  python3 -m venv "$dir/$1"
  "$dir/$1/bin/pip" install -q "$torch" "${@:2}"
}

install mace mace-torch==0.3.16
install nequip nequip==0.19.1
install pet metatrain==2026.4.1 metatomic-ase
install deepmd deepmd-kit==3.2.0 mpich e3nn ase
# the optional C++ operators of its wheel need torch 2.11
find "$dir/deepmd" -name libdeepmd_op_pt.so -exec mv {} {}.off \;
