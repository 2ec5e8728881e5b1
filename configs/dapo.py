"""DAPO on the packaged model (Yu et al. 2025, https://arxiv.org/abs/2503.14476): GRPO with its four changes.

- clip-higher: the ratio may rise further than it may fall (actor.clip_ratio_high)
- dynamic sampling: prompts whose responses are all right or all wrong are replaced (algorithm.filter_groups)
- a token-level loss: every token counts alike, however long its response is (actor.loss_agg_mode)
- overlong shaping: responses that come near the limit lose some of their reward (reward.overlong_buffer)

and no KL. The data, model and reward are the quickstart's, so that it runs in a minute or two on two CPU cores; a step
takes longer the better the model is, since more prompts have to be replaced (train/num_gen_batches). For a model of
your own change `model.path`, `data`, `reward.functions` and the lengths; the paper has 512 prompts x 16 responses a
step, mini-batches of 32 prompts, lr 1e-6, responses of 20,480 tokens with the last 4,096 as the buffer.

    python -m jaxrl_llm.train --config configs/dapo.py --workdir runs/dapo
"""

from __future__ import annotations

from typing import Any

from configs import quickstart


def get_config() -> Any:
    config = quickstart.get_config()
    config.rollout.response_length = 8
    config.actor.update(clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg_mode="token-mean", mini_batch_size=16)
    config.algorithm.filter_groups.update(enable=True, metric="exact", max_num_gen_batches=10)
    config.reward.overlong_buffer.update(enable=True, len=4, penalty_factor=1.0)
    config.trainer.update(steps=60)
    return config
