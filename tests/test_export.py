"""Export: which checkpoint, in which dtype, and what other programs need to find in the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm import export
from jaxrl_llm.models import hf, hf_export
from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.models.transformer import make_transformer
from jaxrl_llm.tokenizer import load_tokenizer
from tests import tiny_folder
from tests.test_hf import FIXTURES
from tests.tiny_runs import checkpointed


def read(folder: Path, dtype: Any = jnp.float32) -> Any:
    model = make_transformer(transformer_config(hf.read_config(folder)), param_dtype=dtype)
    return hf.load_params(folder, model.declare())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run's folder with checkpoints of steps 2 and 5, and the parameters of which they are multiples."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return folder, checkpointed(folder, tiny_folder.config(), (2, 5))


@pytest.mark.parametrize(("options", "step"), [((), 5), (("--step", "2"), 2), (("--step=5",), 5)])
def test_the_checkpoint_that_is_asked_for(
    run: Any, tmp_path: Path, options: Any, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, params = run
    assert export.main([str(folder), str(tmp_path / "out"), *options]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: the model of {folder} after step {step}\n"
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / "out"), jax.tree.map(lambda x: step * x, params))


def test_in_bfloat16(run: Any, tmp_path: Path) -> None:
    folder, params = run
    assert export.main([str(folder), str(tmp_path / "out"), "--dtype=bfloat16"]) == 0
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert {x.dtype for x in files.values()} == {np.dtype(ml_dtypes.bfloat16)}
    config = hf.read_config(tmp_path / "out")
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda x: np.asarray(5 * x, ml_dtypes.bfloat16), params)
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / "out", jnp.bfloat16), rounded)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 0.6 * (
        tiny_folder.folder() / "model.safetensors"
    ).stat().st_size


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--step=3",), 4, "checkpoints/3: no complete checkpoint; there are [2, 5]"),
        (("taken",), 2, "taken: already exists"),
    ],
)
def test_what_is_refused(
    run: Any, tmp_path: Path, options: Any, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    out = str(tmp_path / ("taken" if "taken" in options else "out"))
    assert export.main([str(run[0]), out, *(o for o in options if o != "taken")]) == code
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_tokenizer_is_the_same_and_named_as_older_programs_know_it(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export.export(run[0], out)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in settings
    before, after = load_tokenizer(tiny_folder.folder()), load_tokenizer(out)
    assert after.get_vocab() == before.get_vocab() and after.chat_template == before.chat_template
    assert set(after.all_special_tokens) == set(before.all_special_tokens)
    text = "<|im_start|>W 12+3<|im_end|>"
    assert after(text)["input_ids"] == before(text)["input_ids"]


def test_a_config_names_no_code_and_says_each_layer_types_rope_under_its_old_name() -> None:
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    given = {
        **hf.read_config(FIXTURES / "gemma3"),
        "rope_parameters": {"full_attention": scaled, "sliding_attention": {"rope_type": "default", "rope_theta": 3e3}},
        "auto_map": {"AutoConfig": "configuration_gemma.Config"},
    }
    given = {
        key: value for key, value in given.items() if key not in ("rope_theta", "rope_scaling", "rope_local_base_freq")
    }
    found = hf_export.portable_config(given)
    assert "auto_map" not in found and transformer_config(found) == transformer_config(given)
    # Read by transformers 4, which knows no rope_parameters.
    old = {key: value for key, value in found.items() if key != "rope_parameters"}
    assert transformer_config(old) == transformer_config(given)
    assert (old["rope_theta"], old["rope_local_base_freq"]) == (5e5, 3e3)


@pytest.mark.parametrize("case", ["llama3", "linear", "tied"])
def test_a_config_says_the_same_under_old_names_and_new(tmp_path: Path, case: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / case, source)
    (source / "generation_config.json").unlink(missing_ok=True)
    hf_export.export_policy(tmp_path / "out", read(source), source)
    config = hf.read_config(tmp_path / "out")
    assert transformer_config(config) == transformer_config(hf.read_config(source))
    rope = transformer_config(config).rope
    # transformers 4 reads these two alone.
    assert config["rope_theta"] == rope.theta
    scaling = config.get("rope_scaling") or {"rope_type": "default", "factor": 1.0}
    assert (scaling.get("rope_type", scaling.get("type")), scaling["factor"]) == (rope.kind, rope.factor)
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "bos_token_id": 1, "eos_token_id": [2]
    }  # fmt: skip
