"""A reward model at work: frozen parameters on the mesh that score responses, called like any reward over text.

Its parameters are read from its folder whenever a run starts and are in no checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.compile_log import Report
from jaxrl_llm.compiled import Compiled
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError, naming
from jaxrl_llm.exchanges import Exchanges
from jaxrl_llm.loading import Inputs, load_model_params
from jaxrl_llm.models import classifier, hf
from jaxrl_llm.models.fused_attention import choose
from jaxrl_llm.models.transformer import make_transformer
from jaxrl_llm.sharding import Layout, abstract, abstract_like, fetch
from jaxrl_llm.sources import Record
from jaxrl_llm.steps.phases import sampler_view
from jaxrl_llm.steps.scoring import score_sequences
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.types import Array, Params

TEMPLATE_ROOM = 16  # tokens that a template may write around prompt and response before they are cut


class RewardScorer:
    """(prompts, responses, records) -> one entry a row: `{"score", "truncated", "tokens"}`, or why it cannot be scored.

    `load`, then `compile`, come before the first call. Every call runs one program, on as many rows at a time as
    `reward.model.micro_batch_size` says; the last ones are filled up.
    """

    def __init__(self, config: Config, layout: Layout) -> None:
        """
        Raises:
          UserError: naming what is wrong with the folder, its tokenizer or its template; no parameter is read.
        """
        settings = config.reward.model
        self._config, self._layout = config, layout
        with naming("config.reward.model.path"):
            self._folder = hf.find_folder(settings.path)
            classifier.check_reward_model(self._folder)
            shape = hf.read_shape(self._folder)
        length = config.rollout.prompt_length + config.rollout.response_length + TEMPLATE_ROOM
        self.max_length = settings.max_length or min(length, shape.max_positions)
        if self.max_length > shape.max_positions:
            raise UserError(
                f"config.reward.model.max_length = {self.max_length}: {self._folder} has {shape.max_positions} "
                "positions (max_position_embeddings)"
            )
        self._exchanges = Exchanges(
            tokenizer=load_tokenizer(self._folder),
            vocab_size=shape.vocab_size,
            eos_id=hf.read_eos_ids(self._folder)[0],
            pad_id=classifier.pad_id(self._folder),
            chat_template=settings.chat_template,
            template_kwargs=settings.template_kwargs,
            system_prompt=(config.data.system_prompt or None) if settings.chat_template else None,
            prompt_key=config.data.prompt_key,
            prompt_template=config.data.prompt_template,
        )
        self._exchanges.check("config.reward.model.chat_template")
        dtype = jnp.dtype(config.model.dtype)  # what is never updated needs no more digits than it is computed with
        m = config.model
        options: dict[str, Any] = {"param_dtype": dtype, "compute_dtype": dtype, "constrain": layout.constrain}
        options["attention"] = choose(m.attention, shape, m.dtype, scanned=m.scan_layers, where=layout)
        self._model = make_transformer(shape, **options, score_head=True)
        per_device = config.data.train_batch_size * config.rollout.n // layout.batch_shards
        self._rows = (settings.micro_batch_size or max(per_device, 1)) * layout.batch_shards

    def try_out(self, record: Record) -> None:
        """Renders one exchange, so that a template that refuses them is found out before anything is loaded.

        Raises:
          UserError: it does.
        """
        with naming("config.reward.model"):
            self._exchanges.ids(record, "")

    def load(self) -> None:
        """Reads the parameters.

        Raises:
          UserError: naming the tensors that are missing, unknown or of another shape.
        """
        with naming("config.reward.model.path"):
            # The key is not used: the folder has every leaf.
            params = load_model_params(self._folder, self._model, self._layout, jax.random.key(0))
        self.params = jax.jit(partial(sampler_view, self._config))(params)

    def declare(self) -> None:
        """In place of `load` where the program is only to be compiled: shapes and shardings of the parameters."""
        declared = self._model.declare()
        params = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            abstract(declared),
            self._layout.params(declared),
        )
        # Without what `Compiled` reports: it is no phase of its own.
        self.params = Compiled("view", partial(sampler_view, self._config), params, report=lambda text: None).out

    def compile(self, report: Report) -> None:
        def score(params: Params, tokens: Array, mask: Array) -> Array:
            return score_sequences(self._model, params, *self._layout.constrain_rows((tokens, mask)))

        rows = self._layout.rows
        given = [
            jax.ShapeDtypeStruct((self._rows, self.max_length), dtype, sharding=rows) for dtype in (np.int32, np.bool_)
        ]
        params = abstract_like(self.params)
        self.compiled = Compiled("reward_model", score, params, *given, report=report, out_shardings=rows)

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], records: Sequence[Record]) -> list[Any]:
        del prompts  # the records hold them whole, chats as chats
        found: list[Any] = []
        tokens = np.zeros((-(-len(responses) // self._rows) * self._rows, self.max_length), np.int32)
        mask = np.zeros(tokens.shape, np.bool_)
        mask[:, 0] = True
        for row, (record, response) in enumerate(zip(records, responses, strict=True)):
            try:
                ids = self._exchanges.ids(record, response)
            except UserError as error:
                found.append(error)
                continue
            found.append({"truncated": len(ids) > self.max_length, "tokens": len(ids)})
            kept = self._exchanges.cut(ids, self.max_length)
            tokens[row, : len(kept)], mask[row, : len(kept)] = kept, True
        parts = [slice(start, start + self._rows) for start in range(0, len(tokens), self._rows)]
        scores = [self.compiled(self.params, *self._layout.put_rows((tokens[at], mask[at]))) for at in parts]
        for row, score in enumerate(np.concatenate(fetch(scores))[: len(found)].tolist() if parts else []):
            if isinstance(found[row], dict):
                found[row]["score"] = score
        return found


def make_scorer(config: Config, inputs: Inputs, layout: Layout) -> tuple[RewardScorer | None, Inputs]:
    """The config's reward model, not loaded yet, and the inputs with it among their rewards; None where there is none.

    Raises:
      UserError: see `RewardScorer`.
    """
    if not config.reward.model.path:
        return None, inputs
    scorer = RewardScorer(config, layout)
    for data in (inputs.train, inputs.held_out):
        if data is not None:
            scorer.try_out(data.first()[1])
    rewards = inputs.rewards.with_model(scorer, config.reward.model.weight)
    return scorer, dataclasses.replace(inputs, rewards=rewards)
