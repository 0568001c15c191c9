"""Published models of DeePMD-kit: their addresses, downloads, and the digests of their files."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from tqdm import tqdm

from deepmd_ema.errors import CheckpointError, UserError, is_disk_full
from deepmd_ema.files import atomic_write, file_digest
from deepmd_ema.text import command, did_you_mean

logger = logging.getLogger(__name__)

# folder of `dp pretrained download`
DOWNLOADS = Path.home() / ".cache" / "deepmd" / "pretrained" / "models"
_TIMEOUT_S = 60.0  # for one answer of a server
_BLOCK_BYTES = 1 << 20
MAX_BYTES = (
    4 << 30
)  # no published model is as large; an answer without an end would fill the disk
MIN_RATE = 10_000  # bytes per second; a slower server is left for the next address
RATE_INTERVAL_S = 60.0  # over which the rate is measured
_SITES = (  # in this order
    "https://huggingface.co/deepmodelingcommunity/{}/resolve/main/{}",
    "https://hf-mirror.com/deepmodelingcommunity/{}/resolve/main/{}",
    "https://modelscope.cn/models/DeepModelingCommunity/{}/resolve/master/{}",
)


@dataclass(frozen=True)
class PublishedModel:
    """A model that its authors publish as a checkpoint of DeePMD-kit.

    Attributes:
        name: in the registry of DeePMD-kit 3.2.0.
        descriptor: its type.
        file: name that the file has after a download.
        urls: its addresses, which all have the same file.
        sha256: digest of the file, hexadecimal.
    """

    name: str
    descriptor: str
    file: str
    urls: tuple[str, ...]
    sha256: str


# all of DeePMD-kit 3.2.0: descriptor, digest, name
_MODELS = (
    (
        "dpa2",
        "904eb5560af9ff644347dedd3ebf1e9c97929d02ee37ce3cbe895de3df711198",
        "DPA-2.4-7M",
    ),
    (
        "dpa3",
        "86dd3a804d78ca5d203ebf98747e8f16dff9713ba8950097ceb760b161e19907",
        "DPA-3.1-3M",
    ),
    (
        "dpa3",
        "876354744aeaae17b2639a6a690514470273784f2b4836280850f50cbb799165",
        "DPA-3.2-5M",
    ),
    (
        "dpa3",
        "36fe440c111108d60cda54aa7d3fccac743794de25abef4d49564b9fb896a55b",
        "DPA-3.3-1M",
    ),
    (
        "dpa3",
        "dc4d252b31450b41eb3546cc48f640ad0831c0b5d069ce27d996e0ff58fc037a",
        "DPA3-Omol-Large",
    ),
    (
        "dpa4",
        "7ac5fb696fc057229ceebc33f31f7a96b2f3616ac5b63a512acd1848f2d41a09",
        "DPA4-Air-OMat24-v20260805",
    ),
    (
        "dpa4",
        "13edeea63448c0f8a0b38e08fd8ba196fb1e2fad5f12486b1cd23320829da268",
        "DPA4-Mini-OMat24-v20260805",
    ),
    (
        "dpa4",
        "ded047546c2b44a50e2c850680d77279e2bf3e107c10f1c2fe39a5c344e693f6",
        "DPA4-Nano-OMat24-v20260805",
    ),
    (
        "dpa4",
        "fd7f34ae28f921201e4a0328ddf56179892752084f8363e7796038201471c989",
        "DPA4-Neo-OMat24-v20260805",
    ),
    (
        "dpa4",
        "6820a320dc241a4002e6c257ad21983950df178b1f80271a6e6af199adb18567",
        "DPA4-Plus-OMat24-v20260805",
    ),
)
# names of the file after a download and on the sites, where they are not that of the model
_FILES = {"DPA-2.4-7M": ("dpa-2.4-7M.pt", "DPA-2.4-7M-patched-mt.pt")}
PUBLISHED = tuple(
    PublishedModel(
        name,
        descriptor,
        file,
        tuple(site.format(repository, on_site) for site in _SITES),
        sha256,
    )
    for descriptor, sha256, name in _MODELS
    for file, on_site in [_FILES.get(name, (f"{name}.pt", f"{name}.pt"))]
    for repository in ["DPA4-OMat24" if descriptor == "dpa4" else name]
)


def download(name: str, folder: Path | None = None) -> Path:
    """Return the file of a published model in ``folder`` (:data:`DOWNLOADS`), or download it.

    Raises:
        CheckpointError: if no address gives the file, or a file of its name has other content.
        UserError: if no model has this name.
        WriteError: if the file cannot be written.
    """
    models = {model.name: model for model in PUBLISHED}
    if name not in models:
        raise UserError(
            f"{name}: no published model. {did_you_mean(name, list(models))}"
        )
    model = models[name]
    path = (DOWNLOADS if folder is None else folder) / model.file
    if check_digest(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    with atomic_write(
        path, "Name another folder with `dp-ema pretrained NAME -o FOLDER`."
    ) as part:
        for url in model.urls:
            logger.info("downloading %s from %s to %s", name, url, path)
            try:
                _receive(url, part)
            except (OSError, HTTPException) as error:
                if is_disk_full(error):
                    raise
                failures.append(
                    f"{urlsplit(url).netloc}: "
                    f"{' '.join(str(error).split()) or type(error).__name__}"
                )
                continue
            if file_digest(part) == model.sha256:
                return path
            failures.append(
                f"{urlsplit(url).netloc}: a file with another sha256, {part.stat().st_size:,} bytes"
            )
        raise CheckpointError(
            f"{name}: cannot be downloaded ({'; '.join(failures)}). Try again, or bring the file "
            f"from another machine as {path}."
        )


def _receive(url: str, path: Path) -> None:
    """Write the answer of a server to a file.

    Raises:
        OSError: if the connection fails, the answer is larger than any model, or comes too slowly.
    """
    with urlopen(url, timeout=_TIMEOUT_S) as answer, path.open("wb") as file:
        stated = answer.headers.get("Content-Length") or ""
        # a server that states a wrong size is found by the digest
        size = int(stated) if stated.isdecimal() else None
        with tqdm(
            total=size, unit="B", unit_scale=True, disable=None, leave=False
        ) as bar:
            total = total_before = 0
            begin = time.monotonic()
            # read1 returns what has come: read would wait for a whole block, however slowly it
            # comes
            while block := answer.read1(_BLOCK_BYTES):
                file.write(block)
                bar.update(len(block))
                total += len(block)
                if total > MAX_BYTES:
                    raise OSError(f"more than {MAX_BYTES:,} bytes")
                seconds = time.monotonic() - begin
                if seconds < RATE_INTERVAL_S:
                    continue
                rate = (total - total_before) / seconds
                if rate < MIN_RATE:
                    raise OSError(f"slower than {MIN_RATE / 1000:g} kB/s")
                total_before = total
                begin = time.monotonic()


def local_file(name: str) -> str:
    """Return the path of a file of weights.

    It is downloaded if ``name`` is that of a published model and no path.

    Raises:
        UserError: as :func:`download` does.
    """
    is_published = (
        any(name == model.name for model in PUBLISHED) and not Path(name).exists()
    )
    return str(download(name)) if is_published else name


def check_digest(path: Path) -> str:
    """Return the name of the published model that a file holds, or an empty text.

    The text is empty if no model has a file of that name.

    Raises:
        CheckpointError: if the file has the name of a published one and other content.
    """
    # under its name here, or as it is called where it was published
    candidates = (
        published
        for published in PUBLISHED
        if path.name in (published.file, published.urls[0].rsplit("/", 1)[1])
    )
    model = next(candidates, None)
    if model is None or not path.is_file():
        return ""
    digest = file_digest(path)
    if digest != model.sha256:
        raise CheckpointError(
            f"{path}: has the name of the published model {model.name} and another sha256: "
            f"{digest}, expected {model.sha256}. Remove it and run "
            f"`{command('dp-ema', 'pretrained', model.name)}`; a file of your own needs another "
            "name."
        )
    return model.name
