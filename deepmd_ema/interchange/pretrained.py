"""Published models of DeePMD-kit: where they are, and the digests of their files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deepmd_ema.errors import CheckpointError

_PAGES = "https://huggingface.co/deepmodelingcommunity"
DOWNLOADS = Path.home() / ".cache" / "deepmd" / "pretrained" / "models"  # of `dp pretrained download`


@dataclass(frozen=True)
class PublishedModel:
    """A model that its authors publish as a checkpoint of DeePMD-kit.

    Attributes:
        name: in the registry of DeePMD-kit 3.2.0.
        descriptor: its type.
        file: name that the file has after a download.
        url: its address.
        sha256: digest of the file, hexadecimal.
    """

    name: str
    descriptor: str
    file: str
    url: str
    sha256: str


def _published(name: str, descriptor: str, sha256: str, file: str = "", source: str = "") -> PublishedModel:
    url = f"{_PAGES}/{name}/resolve/main/{source or f'{name}.pt'}"
    return PublishedModel(name, descriptor, file or f"{name}.pt", url, sha256)


# those of DeePMD-kit 3.2.0 whose descriptors are here
PUBLISHED = (
    _published(
        "DPA-2.4-7M", "dpa2", "904eb5560af9ff644347dedd3ebf1e9c97929d02ee37ce3cbe895de3df711198",
        file="dpa-2.4-7M.pt", source="DPA-2.4-7M-patched-mt.pt",
    ),
    _published("DPA-3.1-3M", "dpa3", "86dd3a804d78ca5d203ebf98747e8f16dff9713ba8950097ceb760b161e19907"),
    _published("DPA-3.2-5M", "dpa3", "876354744aeaae17b2639a6a690514470273784f2b4836280850f50cbb799165"),
    _published("DPA-3.3-1M", "dpa3", "36fe440c111108d60cda54aa7d3fccac743794de25abef4d49564b9fb896a55b"),
    _published("DPA3-Omol-Large", "dpa3", "dc4d252b31450b41eb3546cc48f640ad0831c0b5d069ce27d996e0ff58fc037a"),
)  # fmt: skip


def check_digest(path: Path, published: Iterable[PublishedModel] = PUBLISHED) -> str:
    """Return the name of the published model that a file holds, or an empty string: no model has a file of that name.

    Raises:
        CheckpointError: if the file has the name of a published one and other content.
    """
    model = next((one for one in published if path.name in (one.file, one.url.rsplit("/", 1)[1])), None)
    if model is None or not path.is_file():
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    found = digest.hexdigest()
    if found != model.sha256:
        raise CheckpointError(
            f"{path}: has the name of the published model {model.name} and another sha256: {found}, expected "
            f"{model.sha256}. Download it again from {model.url}; a file of your own needs another name."
        )
    return model.name
