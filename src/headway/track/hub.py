"""Models and datasets of the Hugging Face Hub: `hf:org/name@revision`, through huggingface_hub and its cache.

A reference becomes a folder in the cache whose path has the commit: what a recipe or a dataset records is pinned.
Only weights in safetensors, settings in JSON, tokenizers and templates are fetched, and nothing of them is executed.
Without a network the cache answers. HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they always do.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from headway.errors import ModelError, UsageError

PREFIX = "hf:"
MODEL_FILES = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json", "adapter_config.json",
    "preprocessor_config.json", "processor_config.json", "headway.json",
)  # fmt: skip
"""Files of a model that are fetched; never pickles or code."""
DATA_FILES = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.ndjson", "*.txt", "*.txt.gz", "*.txt.zst")

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REF = re.compile(rf"hf:({_PART}(?:/{_PART})?)(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,254}}))?(?::(.+))?")
_SNAPSHOT = re.compile(
    r"/(models|datasets)--([A-Za-z0-9._-]+?)(?:--([A-Za-z0-9._-]+))?/snapshots/([0-9a-f]{40})(?:/|$)"
)


@dataclass(frozen=True)
class HubRef:
    """A repository, a branch, tag or commit of it, and, of datasets, which of its files."""

    repo: str
    revision: str | None = None
    files: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}{f'@{self.revision}' if self.revision else ''}"


def is_hub(text: str) -> bool:
    """Whether a text refers to the Hub."""
    return text.startswith(PREFIX)


def parse_hub(text: str) -> HubRef:
    """Return the parts of `hf:org/name@revision`; raise UsageError for another text."""
    match = _REF.fullmatch(text)
    if match is None or ".." in (match[2] or "") or ".." in match[1]:
        raise UsageError(f"{text!r} is no address on the Hub", hint="hf:org/name, or hf:org/name@revision")
    return HubRef(match[1], match[2], match[3])


def hub_of(path: str | Path) -> str | None:
    """Return `hf:org/name@commit` of a path in the Hub's cache; None for any other."""
    match = _SNAPSHOT.search(str(path))
    if match is None:
        return None
    return f"{PREFIX}{match[2]}{f'/{match[3]}' if match[3] else ''}@{match[4]}"


def local_model(ref: str) -> str:
    """Return the folder of a model that is on the Hub, fetched if it is not cached; any other reference as it is."""
    return str(fetch_model(parse_hub(ref))) if is_hub(ref) else ref


def local_folder(path: Path) -> Path:
    """Return the folder that a path of a command line names, which may be `hf:org/name`."""
    return Path(local_model(str(path)))


def fetch_model(ref: HubRef) -> Path:
    """Return the folder of a model's files in the cache; raise ModelError if it has no weights in safetensors."""
    if ref.files is not None:
        raise UsageError(f"{ref}: a model is a whole repository", hint=f"leave out :{ref.files}")
    folder = _snapshot(ref, "model", list(MODEL_FILES))
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{ref} has no weights in safetensors", hint="only these are loaded; other formats can execute code"
        )
    return folder


def fetch_data(ref: HubRef) -> list[Path]:
    """Return the Parquet, JSONL and text files of a dataset in the cache; raise UsageError if there is none."""
    patterns = [ref.files] if ref.files else list(DATA_FILES)
    folder = _snapshot(ref, "dataset", patterns)
    names = (path for path in sorted(folder.rglob("*")) if path.is_file())
    files = [path for path in names if any(fnmatch(str(path.relative_to(folder)), pattern) for pattern in patterns)]
    if not files:
        raise UsageError(
            f"{ref} has no file that matches {ref.files or 'Parquet, JSONL or text'}",
            hint="hf:org/name@revision:PATTERN names files, such as hf:org/name:train/*.parquet",
        )
    return files


def hub_sources(sources: Sequence[str]) -> list[str]:
    """Return sources of a dataset with those on the Hub replaced by their files."""
    paths = list[str]()
    for source in sources:
        paths += [str(path) for path in fetch_data(parse_hub(source))] if is_hub(source) else [source]
    return paths


def _snapshot(ref: HubRef, kind: str, patterns: list[str]) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub as hub  # takes 0.1 s
    from huggingface_hub import errors

    options: dict[str, Any] = {"repo_type": kind, "revision": ref.revision, "allow_patterns": patterns}
    where = f"{ref} ({kind})"
    try:
        with suppress(errors.LocalEntryNotFoundError):  # a commit that is cached needs no network
            if ref.revision is not None and re.fullmatch(r"[0-9a-f]{40}", ref.revision):
                folder = Path(hub.snapshot_download(ref.repo, local_files_only=True, **options))
                if _complete(folder, patterns):
                    return folder
        return Path(hub.snapshot_download(ref.repo, etag_timeout=10, **options))
    except errors.GatedRepoError:
        raise ModelError(f"{where} is gated", hint="accept its terms on the Hub, and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no {where}, or it is private", hint="check the name; HF_TOKEN gives access"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{ref.repo} has no revision {ref.revision!r}", hint="a branch, a tag or a commit") from None
    except errors.LocalEntryNotFoundError:
        raise ModelError(
            f"{where} is not in the cache, and the Hub does not answer",
            hint="fetch it where there is a network, and copy HF_HOME; or unset HF_HUB_OFFLINE",
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot fetch {where}: {line}") from None


def _complete(folder: Path, patterns: Sequence[str]) -> bool:
    """Whether a cached folder has what its index of weights lists; an interrupted download has not."""
    import json

    present = [path.name for path in folder.glob("*")]
    if "config.json" not in present:
        return False
    for index in folder.glob("*.safetensors.index.json"):
        try:
            wanted = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return wanted <= set(present)
    return "*.safetensors" in patterns and any(name.endswith(".safetensors") for name in present)
