"""The part of the comparisons that runs in DeePMD-kit's environment: it makes models, and evaluates
model files.

usage: DIR/bin/python tests/peer/peer_side.py JOBS.json

JOBS.json holds a list of dictionaries with ``out``, where the answer goes, and one of

- ``input``: a section ``model``. A model is made of it, all its numbers are drawn at random, and
  ``out``.dp is written.
- ``file``: a ``.dp`` file that is read, or a ``.pt`` of the backend pt, of which every tensor has
  to be of the model.
- ``predict``: a file of any format, which ``DeepPot`` reads.
- ``train``: words of a training command, run in the folder ``cwd``; nothing is predicted.
- ``convert``: a file that what ``dp convert-backend`` calls converts to ``out``.pth, which
  ``DeepPot`` reads.

Energies, forces and virials of the frames in ``frames`` are written to ``out``.npz, or what it says
instead to ``out``.error.
"""

import copy
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

OUTPUTS = ("energy", "atom_energy", "force", "virial")


def main() -> None:
    """Do the jobs of the file named on the command line, all of them."""
    import torch

    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        out = Path(job["out"])
        try:
            found = answer(job)
        except Exception:  # a model that DeePMD-kit does not take is an answer too
            out.with_suffix(".error").write_text(traceback.format_exc())
            continue
        np.savez(out.with_suffix(".npz"), **found)


def frames_of(path: str | Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays ``coord``, ``type`` and ``box`` of each system of a file: names are
    ``SYSTEM_ARRAY``.
    """
    with np.load(path) as file:
        names = sorted({key.rpartition("_")[0] for key in file.files})
        return {
            name: {key: file[f"{name}_{key}"] for key in ("coord", "type", "box")}
            for name in names
        }


def conditions(job: dict[str, Any], frames: int, atoms: int) -> dict[str, np.ndarray]:
    """Return parameters of frames and atoms, as many as the model of a job takes."""
    found = {}
    if job.get("numb_fparam") and not job.get("default_fparam"):
        count = job["numb_fparam"]
        found["fparam"] = 0.1 * np.arange(frames * count, dtype=float).reshape(
            frames, count
        )
    if job.get("numb_aparam"):
        count = job["numb_aparam"]
        found["aparam"] = 0.01 * np.arange(frames * atoms * count, dtype=float).reshape(
            frames, atoms, count
        )
    return found


def answer(job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Make or read the model of a job and return its predictions."""
    out = Path(job["out"])
    if "train" in job:
        return _trained(job)
    if "convert" in job:
        from deepmd.entrypoints.convert_backend import convert_backend

        convert_backend(INPUT=job["convert"], OUTPUT=str(out.with_suffix(".pth")))
        return _by_deep_pot({**job, "predict": str(out.with_suffix(".pth"))})
    if "predict" in job:
        return _by_deep_pot(job)
    if "file" in job:
        model = read_model(job["file"])
    else:
        from deepmd.dpmodel.utils.serialization import save_dp_model

        section = (
            _normalized(job["input"])
            if job.get("normalize", True)
            else copy.deepcopy(job["input"])
        )
        model = _made(section, job)
        tree = model.serialize()
        # DeePMD-kit keeps it as arrays outside of @variables, and cannot write them
        tree["preset_out_bias"] = _as_lists(tree.get("preset_out_bias"))
        data = {"model": tree, "model_def_script": job["input"], "backend": "PyTorch"}
        save_dp_model(str(out.with_suffix(".dp")), data)
    return _predictions(model.eval(), job)


def read_model(path: str) -> Any:
    """Return the model of a ``.dp``, or of a ``.pt`` as commands but ``dp test`` read it: by all
    names of modules.
    """
    import torch
    from deepmd.dpmodel.utils.serialization import load_dp_model
    from deepmd.pt.model.model import get_model
    from deepmd.pt.model.model.model import BaseModel
    from deepmd.pt.train.wrapper import ModelWrapper

    if path.endswith(".dp"):
        tree = load_dp_model(path)["model"]
        # its torch backend writes a type that it does not read
        return BaseModel.deserialize(
            {
                **tree,
                "type": "linear_ener" if tree["type"] == "linear" else tree["type"],
            }
        )
    state = torch.load(path, weights_only=True)["model"]
    wrapper = ModelWrapper(
        get_model(copy.deepcopy(state["_extra_state"]["model_params"]))
    )
    wrapper.load_state_dict(state)
    return wrapper.model["Default"]


def _as_lists(preset: Any) -> Any:
    """Return the preset biases of the atoms as an input has them: lists, in which null is
    fitted.
    """
    if preset is None:
        return None
    return {
        name: [None if one is None else np.asarray(one).tolist() for one in rows]
        for name, rows in preset.items()
    }


def _normalized(section: dict[str, Any]) -> dict[str, Any]:
    """Return a section ``model`` as the training command makes it: checked, names and defaults
    filled in.
    """
    from deepmd.utils.argcheck import normalize

    data = {"systems": ["none"], "batch_size": 1}
    rest = {
        "training": {"training_data": data, "numb_steps": 1},
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5},
    }
    return normalize(
        {"model": copy.deepcopy(section), **rest, "loss": {"type": "ener"}}
    )["model"]


def _made(section: dict[str, Any], job: dict[str, Any]) -> Any:
    """Return a model with numbers drawn at random, in place of those of a start."""
    import torch
    from deepmd.pt.model.model import get_model

    torch.manual_seed(job["seed"])
    model = get_model(section)
    generator = torch.Generator().manual_seed(job["seed"])

    def draw(like: Any) -> Any:
        return torch.rand(like.shape, generator=generator, dtype=torch.float64).to(
            like.dtype
        )

    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * (draw(parameter) - 0.5)
        for name, buffer in model.named_buffers():
            _fill_buffer(name, buffer, draw, job)
    return model


def _fill_buffer(name: str, buffer: Any, draw: Any, job: dict[str, Any]) -> None:
    """Give statistics and biases numbers that a wrong formula cannot hide behind."""
    leaf = name.rpartition(".")[2]
    if leaf in ("mean", "davg") and buffer.ndim == 3:
        mean = 0.05 * draw(buffer[..., 0])
        # as from a fit: the same in all slots, without which images at the same distance stand in
        # an accidental order
        buffer[..., 0] = mean[:, :1] if job.get("one_mean") else mean
    elif leaf in ("stddev", "dstd") and buffer.ndim == 3:
        buffer[..., 0] = (0.1 + 0.2 * draw(buffer[:, 0, 0]))[:, None]
        buffer[..., 1:] = (0.2 + 0.3 * draw(buffer[:, 0, 0]))[:, None, None]
    elif leaf in ("bias_atom_e", "case_embd"):
        buffer.copy_(draw(buffer) - 2)
    elif leaf == "out_bias" and ".models." not in name:
        buffer.copy_(3 * draw(buffer) - 20)
    elif leaf in ("fparam_avg", "aparam_avg"):
        buffer.copy_(0.3 * draw(buffer))
    elif leaf in ("fparam_inv_std", "aparam_inv_std"):
        buffer.copy_(1 + draw(buffer))


def _predictions(model: Any, job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return energy (F,), atomic energy (F, N), force (F, N, 3) and virial (F, 9) of each
    system.
    """
    import torch

    found = {}
    for name, system in frames_of(job["frames"]).items():
        coord, kinds, box = system["coord"], system["type"], system["box"]
        count, atoms = coord.shape[:2]
        more = {
            key: torch.tensor(value)
            for key, value in conditions(job, count, atoms).items()
        }
        cells = torch.tensor(box) if box.size else None
        got = model(
            torch.tensor(coord),
            torch.tensor(np.repeat(kinds[None], count, 0)),
            box=cells,
            **more,
        )
        shapes = {
            "energy": (count,),
            "atom_energy": (count, atoms),
            "force": coord.shape,
            "virial": (count, 9),
        }
        found |= {
            f"{name}_{key}": got[key].detach().numpy().reshape(shape)
            for key, shape in shapes.items()
        }
    return found


def _trained(job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Run a training command in its folder, in this process."""
    from deepmd.main import main as deepmd

    before = os.getcwd()
    os.chdir(job["cwd"])
    try:
        deepmd(job["train"])
    finally:
        os.chdir(before)
    return {}


def _by_deep_pot(job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the same of a model file, from ``DeepPot``."""
    from deepmd.infer import DeepPot

    potential = DeepPot(job["predict"], **job.get("options", {}))
    found = {}
    for name, system in frames_of(job["frames"]).items():
        coord, kinds, box = system["coord"], system["type"], system["box"]
        count, atoms = coord.shape[:2]
        more = {
            key: value.reshape(count, -1)
            for key, value in conditions(job, count, atoms).items()
        }
        cells = box if box.size else None
        got = potential.eval(
            coord.reshape(count, -1), cells, kinds, atomic=True, **more
        )
        energy, force, virial, atom_energy = got[:4]
        found |= {
            f"{name}_energy": energy.reshape(count),
            f"{name}_atom_energy": atom_energy.reshape(count, atoms),
            f"{name}_force": force.reshape(coord.shape),
            f"{name}_virial": virial.reshape(count, 9),
        }
    return found


if __name__ == "__main__":
    main()
