"""Compares a run with its exported folder in torch: greedy text of both, for the same prompts. Prints JSON.

    TORCH_PYTHON -m benchmarks.parity_export runs/quickstart models/quickstart prompts.txt --python .venv/bin/python

It is run where torch and transformers are, neither of which this package needs; `--python` is the environment of the
package, which writes the folder (`python -m jaxrl_llm.export`, unless it is there) and samples at temperature 0. Torch
reads nothing but the folder: weights, config, generation config, tokenizer, chat template.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = """
import json, sys
from jaxrl_llm.generate import generate
from jaxrl_llm.steps.sampling import Sampling

run, prompts, tokens = json.load(sys.stdin)
*_, last = generate(run, prompts, max_new_tokens=tokens, sampling=Sampling(temperature=0.0))
print(json.dumps([text for text, _ in last]))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all texts are the same, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path, help="the exported folder")
    parser.add_argument("prompts", type=Path, help="a text file with one prompt a line")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has jaxrl_llm")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args(argv)
    prompts = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not args.folder.exists():
        command = [args.python, "-m", "jaxrl_llm.export", str(args.run), str(args.folder)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    asked = json.dumps([str(args.run), prompts, args.max_new_tokens])
    done = subprocess.run([args.python, "-c", HERE], input=asked, stdout=subprocess.PIPE, text=True, check=True)
    here = json.loads(done.stdout.splitlines()[-1])
    data = json.loads((args.run / "config.json").read_text())["data"]
    there, versions = in_torch(args.folder, prompts, data, args.max_new_tokens)
    different = [
        {"prompt": prompt, "here": a, "torch": b} for prompt, a, b in zip(prompts, here, there, strict=True) if a != b
    ]
    found = {"prompts": len(prompts), "equal": len(prompts) - len(different), "distinct_texts": len(set(here))}
    print(json.dumps(found | versions | {"different": different}, indent=1, ensure_ascii=False))
    return 1 if different else 0


def in_torch(folder: Path, prompts: Sequence[str], data: dict[str, Any], tokens: int) -> tuple[list[str], dict]:
    """Greedy responses of transformers, one prompt at a time, and the versions that gave them."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    texts = []
    for prompt in prompts:
        if data["chat_template"]:
            system = [{"role": "system", "content": data["system_prompt"]}] if data["system_prompt"] else []
            chat = [*system, {"role": "user", "content": prompt}]
            rendered = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False, **data["template_kwargs"]
            )
            given = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")
        else:
            given = tokenizer(prompt, return_tensors="pt")
        ids, mask = given["input_ids"], given["attention_mask"]
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    dtype = str(next(model.parameters()).dtype)
    return texts, {"torch": torch.__version__, "transformers": transformers.__version__, "torch_dtype": dtype}


if __name__ == "__main__":
    sys.exit(main())
