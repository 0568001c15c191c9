"""Files of DeePMD-kit: what is written comes back to the bit, what cannot be read is named."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from interchange_cases import VARIANTS, same_bits
from toy_models import toy_model, write_dp

from deepmd_ema.errors import CheckpointError
from deepmd_ema.interop.dp import read_dp

GOLDEN = Path(__file__).parents[1] / "golden"  # made_by: see golden/README.md


def precision_as_text(config):
    """Return the config with the precision that `default` is for, as files have it."""
    parts = {name: getattr(config, name) for name in ("descriptor", "fitting_net")}
    return replace(
        config,
        **{
            name: replace(part, precision="float64")
            for name, part in parts.items()
            if part.precision == "default"
        },
    )


@pytest.mark.parametrize("suffix", [".dp", ".yaml"])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_model_comes_back_to_the_bit(variant, suffix, tmp_path):
    config, model = toy_model(**VARIANTS[variant])
    path = tmp_path / f"model{suffix}"
    write_dp(
        path, model, config, min_nbor_dist=0.87, extra={"weights": "live", "step": 12}
    )
    again, loaded, info = read_dp(path)
    same_bits(loaded, model)
    assert again == precision_as_text(config)
    assert info["min_nbor_dist"] == loaded.min_nbor_dist == 0.87
    assert info["dp_ema"] == {"weights": "live", "step": 12}
    assert info["software"] == "dp-ema"
    assert not loaded.training


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.dp")))
def test_a_file_of_deepmd_kit_written_again_holds_the_same_entries(name, tmp_path):
    """Every key of the peer's tree is in ours, with the same value to the bit."""
    config, model, info = read_dp(GOLDEN / f"{name}.dp")
    assert info["dp_ema"] == {}
    write_dp(tmp_path / "ours.dp", model, config)
    theirs, ours = (
        tree_of(path) for path in (GOLDEN / f"{name}.dp", tmp_path / "ours.dp")
    )
    assert missing_or_other(theirs["model"], ours["model"]) == OTHERWISE.get(
        name, ["/fitting/atom_ener"]
    )
    assert set(theirs) - {"time"} <= set(ours)


# "atom_ener" is null there and an empty list here; a table is made into a spline anew, to the last
# digits
OTHERWISE = {
    "zbl": [
        "/models/0/fitting/atom_ener",
        "/models/1/tab/rmax",
        "/models/1/tab/@variables/tab_data",
    ],
    # "default" there, float64 here
    "dpa2_direct": ["/fitting/precision", "/fitting/nets/networks/0/precision"],
    # the energies of elements that its parts add on their own are in that of the whole; its torch
    # backend does not read the type that it writes
    "linear": [
        "/@variables/out_bias",
        "/type",
        "/models/0/@variables/out_bias",
        "/models/0/fitting/atom_ener",
        "/models/1/@variables/out_bias",
        "/models/1/fitting/atom_ener",
        "/models/2/@variables/out_bias",
        "/models/2/tab/rmax",
        "/models/2/tab/@variables/tab_data",
    ],
    # of each pair of elements it has two networks and uses one
    "se_e3": [
        f"/descriptor/embeddings/networks/{k}/layers/{layer}/@variables/{name}"
        for k in (1, 2, 5)
        for layer in range(3)
        for name in ("w", "b", "idt")[: 3 if layer else 2]
    ]
    + ["/fitting/atom_ener"],
}


def tree_of(path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path) as file:

        def resolved(value):
            if isinstance(value, dict):
                return {k: resolved(v) for k, v in value.items()}
            if isinstance(value, list):
                return [resolved(v) for v in value]
            return (
                file[value][()]
                if isinstance(value, str) and value.startswith("/variable_")
                else value
            )

        return resolved(json.loads(file.attrs["json"]))


def missing_or_other(theirs, ours, path=""):
    if isinstance(theirs, dict):
        return [
            p
            for k, v in theirs.items()
            for p in (
                [f"{path}/{k}"]
                if k not in ours
                else missing_or_other(v, ours[k], f"{path}/{k}")
            )
        ]
    if isinstance(theirs, list) and any(
        isinstance(one, dict | np.ndarray) for one in theirs
    ):
        both = enumerate(zip(theirs, ours, strict=True))
        return [p for k, (a, b) in both for p in missing_or_other(a, b, f"{path}/{k}")]
    if isinstance(theirs, np.ndarray):
        return (
            []
            if theirs.dtype == ours.dtype and np.array_equal(theirs, ours)
            else [path]
        )
    return [] if theirs == ours else [path]


def edited(tmp_path, change):
    """Return a .yaml model file in which ``change`` edited the tree."""
    config, model = toy_model(
        descriptor_changes={"sel": [4, 4, 4], "neuron": [2], "axis_neuron": 1},
        fitting_changes={"neuron": [2]},
    )
    path = tmp_path / "model.yaml"
    write_dp(path, model, config)
    tree = yaml.safe_load(path.read_text())
    del tree["digest"]  # which would say no more than that it was changed
    tree["software"] = "deepmd-kit"  # whose files have no digest
    change(tree)
    path.write_text(yaml.safe_dump(tree))
    return path


def drop_bias(tree):
    del tree["model"]["fitting"]["nets"]["networks"][0]["layers"][0]["@variables"]["b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t["model"]["descriptor"].update(type="loc_frame"),
            r"model.yaml: descriptor 'loc_frame' is not available here\. Known: se_e2_a, ",
        ),
        (
            lambda t: t["model"]["fitting"].update(type="population"),
            r"fitting 'population' is not available here\. Known: ener",
        ),
        (
            lambda t: t["model"].update(type="pairwise"),
            "a model of type 'pairwise'; available here: standard, zbl",
        ),
        (
            lambda t: t["model"]["descriptor"].update({"@version": 3}),
            r"version 3 \(compressed\), which is not available",
        ),
        (
            lambda t: t["model"]["descriptor"].update(spin={"use_spin": [True]}),
            "uses spin, which is not available",
        ),
        (drop_bias, r"nets\[0\]\.layers\[0\]: b is missing"),
        (
            lambda t: t["model"].pop("type_map"),
            "an entry of the model is missing or of another kind: KeyError",
        ),
        (lambda t: t.pop("model"), "no model inside"),
    ],
)
def test_what_cannot_be_read_is_named(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        read_dp(edited(tmp_path, change))


def test_damaged_and_missing_files_are_named(tmp_path):
    h5py = pytest.importorskip("h5py")
    config, model = toy_model()
    write_dp(tmp_path / "whole.dp", model, config)
    whole = (tmp_path / "whole.dp").read_bytes()
    (tmp_path / "cut.dp").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.yaml").write_text("model: [1, 2")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with h5py.File(tmp_path / "other.dp", "w") as file:
        file["x"] = 1
    for name, message in (
        ("absent.dp", "absent.dp: no such file"),
        ("cut.dp", "cut.dp: damaged, or not an HDF5 model file"),
        ("other.dp", "other.dp: HDF5, but no model inside"),
        ("text.yaml", "text.yaml: damaged, or not a YAML model file"),
        ("list.yaml", "list.yaml: holds list, expected the dictionary of a model"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_dp(tmp_path / name)
