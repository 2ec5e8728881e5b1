"""Every knob, its default and what it means.

A recipe starts from here and changes what it needs:

    from configs import base

    def get_config():
        config = base.get_config()
        config.model.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
        config.data.train = ("train.jsonl",)
        return config

On the command line: `--config configs/recipe.py --config.actor.clip_ratio=0.1`. A tuple is written as Python writes it,
`--config.rollout.stop='("###", "\\n\\n")'`; a single string may stand alone. Everything is checked once, before a model
is loaded (`jaxrl_llm/config.py` holds the types and ranges, `config_rules.py` the rules between keys). Names are verl's
where verl has one.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict


def get_config() -> Any:
    """An ml_collections.ConfigDict. (To a type checker Any: the attributes of a ConfigDict are dynamic.)"""
    # type_safe=False: a recipe may assign anything here; jaxrl_llm.config checks types, and reports all errors at once.
    return ConfigDict(
        {
            "seed": 0,  # of data order, sampling and fresh parameters
            "model": _model(),
            "rollout": _rollout(),
            "data": _data(),
            "reward": _reward(),
            "algorithm": _algorithm(),
            "actor": _actor(),
            "critic": _critic(),
            "reference": _reference(),
            "optimizer": optimizer(lr=1e-6),  # of the policy; the critic has its own, `critic.optimizer`
            "mesh": _mesh(),
            "trainer": _trainer(),
            "eval": _eval(),
            "logging": _logging(),
        },
        type_safe=False,
    )


def _model() -> dict:
    return {
        "path": "",  # of the actor: Hugging Face folder, hub id or GGUF file; must be given
        "fresh": False,  # True: random parameters in the shape of the folder's config.json; its weights are not read
        "dtype": "float32",  # of the computation: float32 | bfloat16 (logits, softmax and log-probs are always float32)
        "param_dtype": "float32",  # of the parameters and the optimizer's moments: float32 | bfloat16
        # LoRA: only low-rank corrections of the projections are trained, on frozen parameters held in `dtype` (and a
        # reward model's head, whole).
        "lora_rank": 0,  # of the corrections; 0: all parameters are trained
        "lora_alpha": 16.0,  # a correction is A B x lora_alpha / lora_rank
        # all-linear, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.
        "target_modules": ("all-linear",),
        "quantize_base": "none",  # of the frozen projections beneath: none | int8 (a quarter of float32's memory)
        "scan_layers": True,  # True: one compiled layer, scanned (fast to compile). False: unrolled (faster on a CPU)
        # What the backward pass computes again instead of storing. none: nothing, most memory.
        # dots: all but matrix products. full: whole layers, least memory.
        "remat": "none",
        # What computes attention where there is no cache: in log-probs, values, scores and updates. xla: plain products
        # and a softmax. cudnn (NVIDIA GPUs) and splash (TPUs): one kernel that never writes scores to memory. auto: the
        # device's kernel where it does what the model asks and a trial at the start agrees with xla; else xla.
        "attention": "auto",
        # For long rows. True: between a layer's products, and in what a backward pass keeps of it, each of the
        # mesh.tensor devices has a share of every row's tokens. False: it has all of them.
        "sequence_parallel": False,
        # True: log-probs, values and updates compute the responses to a prompt one right after the other in one line,
        # and not what follows each up to rollout.response_length. Lines are of fixed widths, and a step takes the
        # narrowest that holds its longest group.
        "use_remove_padding": False,
        # Those widths, as shares of n x response_length; each is one more program of every such phase, which are
        # compiled before the first step. (What fits into none is computed as with False.)
        "packed_widths": (0.25, 0.375, 0.5, 0.75),
        "logprob_chunk": 1024,  # tokens per device whose logits exist at a time when log-probs are computed
    }


def _rollout() -> dict:
    return {
        "n": 8,  # responses per prompt; group estimators need at least 2
        "prompt_length": 512,  # tokens; width of the prompt frame, see data.too_long
        "response_length": 512,  # tokens; width of the response frame
        "temperature": 1.0,  # > 0; log-probs, old, new and reference, are all of logits / temperature
        "top_k": 0,  # keep the k likeliest tokens; 0: all
        "top_p": 1.0,  # keep the likeliest tokens that together reach this probability; in (0, 1]
        "min_p": 0.0,  # drop tokens less likely than this fraction of the likeliest; in [0, 1]
        "ignore_eos": False,  # True: an end token does not end a response (for timing runs)
        "min_new_tokens": 0,  # end tokens cannot be drawn before this many tokens
        "stop": (),  # strings that end a response, found across token borders
        "stop_token_ids": (),  # token ids that end a response, beside the model's own end tokens
        # The prompts of a step are sampled in so many parts, one after the other; rewards of a part are worked out
        # while the next one is sampled. More parts, smaller programs: worth it where rewards are slow.
        "parts": 1,
        # True: fsdp is undone once for a rollout, so that every device holds all of the sampler's parameters (but for
        # what mesh.tensor cuts). False: each layer's are gathered for every token, unless model.scan_layers is False.
        "gather_params": False,
        # Shapes in which a rollout decodes; each is a loop of its own in the program, so that more of them take longer
        # to compile. What is sampled does not depend on them.
        "cascade": {
            "width": 64,  # slots of a row's cache at first, which double up to response_length; 0: all at once
            "halvings": 2,  # as rows end, the batch becomes so often half as large; 0: all rows stay to the end
            "min_rows": 8,  # on a device; smaller batches are not halved any more
        },
        # A conversation: at the end of a turn (an end token or a stop) the environment answers, and the policy goes on.
        "multi_turn": {
            # A name (jaxrl_llm/environments.py), module:function or file.py:function, with arguments if need be:
            # "calculator(opening='(', closing=')')". "": one turn, no environment.
            "environment": "",
            "max_assistant_turns": 4,  # turns of the policy, the last of which is not answered any more
            "max_observation_length": 64,  # tokens of an answer, those that the chat template writes around it included
        },
    }


def _data() -> dict:
    return {
        # Sources of training prompts, one string or several: file.jsonl, file.parquet, folder or folder:split (as
        # datasets.save_to_disk writes it), hf:name or hf:name:config:split (the hub), module:function(key=value) or
        # file.py:function (a function that returns records).
        "train": (),
        "weights": (),  # share of each source in the mixture; (): every record once an epoch
        # Sources of held-out prompts, written like `train`; (): no evaluation. Each may have a name, as in
        # "sums=jaxrl_llm.tasks:addition(split='test')", which its metrics have (val-core/sums/…) instead of the
        # records' data_source.
        "eval": (),
        "train_batch_size": 8,  # prompts a step; rollout.n responses to each
        "shuffle": True,  # a new order each epoch, a function of seed and epoch
        "prompt_key": "prompt",  # field of a record that holds the prompt: a string, or a list of chat messages
        "response_key": "response",  # field that holds the answer to learn from, for jaxrl_llm.sft alone
        # For jaxrl_llm.reward_model alone, each response a text or a list of chat messages:
        "chosen_key": "chosen",  # field that holds the better response
        "rejected_key": "rejected",  # field that holds the worse one
        "prompt_template": "",  # with {field} of the record, instead of prompt_key: "What is {a}+{b}?"
        "chat_template": True,  # render prompts through the model's chat template; False: the bare text
        "system_prompt": "",  # first message of every chat; "": what the template does by itself
        "template_kwargs": {},  # variables for the chat template, such as {"enable_thinking": False}
        "too_long": "error",  # a prompt longer than rollout.prompt_length: error | drop (counted and reported)
        # A record that cannot be read, has no prompt, or that the template refuses: error (which names file and line) |
        # skip (counted and reported; if all are bad, an error).
        "on_bad_record": "error",
        "source_kwargs": {},  # further arguments of the function, or of datasets.load_dataset
        # Which prompts are drawn, by how often the policy has got them right (the mean of `metric`, in [0, 1], over its
        # responses). uniform: all alike. hard: weight 1 - success. frontier: weight success x (1 - success), so that
        # what always fails is drawn as seldom as what never does. Prompts not drawn yet weigh most.
        "curriculum": {
            "sampler": "uniform",  # uniform (every prompt once an epoch) | hard | frontier
            "metric": "score",  # score (the weighted sum), a reward's name, or a value beside its score: "name/acc"
            "smoothing": 0.5,  # share of the newest step in a prompt's success, in (0, 1]
            "floor": 0.05,  # weight that every prompt keeps, of a most of 1
        },
    }


def _reward() -> dict:
    return {
        # Names of built-in rewards (docs/rewards.md lists them), module:function or file.py:function; arguments may
        # follow, as in "format(pattern='…')". None are needed where there is a reward model.
        "functions": (),
        "weights": (),  # factor of each in the score; (): 1 each
        "data_sources": (),  # per function the record's data_source that it scores, "": all; (): all score all
        # Functions over text run in processes without jax, one response at a time, see docs/rewards.md. A response
        # whose reward fails (an exception, None, NaN, a crash, too slow) is left out and counted, reward/failed_ratio.
        "num_workers": -1,  # how many; -1: one per CPU core, but at most 8; 0: in this process, without a deadline
        "timeout": 10.0,  # seconds a response may take before its worker is killed; a batched call may take their sum
        "memory_limit": 4.0,  # GB of a worker, and of each process that it starts; 0: none
        # Share of a step's responses whose reward may fail; more ends the run, exit code 3. All failing always does.
        "max_failed_ratio": 0.5,
        # A reward model beside the functions, or alone: one more score of every response, named reward_model. A weight
        # of 0 for a function makes it one that is only watched.
        "model": {
            "path": "",  # folder or hub id of a sequence classifier with one label; "": none
            "weight": 1.0,  # factor of its score
            # Tokens of prompt and response as it reads them; what is longer is cut at its end, which the metric
            # reward_extra/reward_model/truncated counts. 0: rollout.prompt_length + rollout.response_length + 16, the
            # latter for what a template writes around them (or what the model has positions for).
            "max_length": 0,
            "micro_batch_size": 0,  # rows per device at a time; 0: those of a training step
            "chat_template": True,  # render both through its own chat template; False: the bare texts and its end token
            "template_kwargs": {},  # variables for that template
            # Of jaxrl_llm.reward_model alone: the loss takes this x (score of chosen + score of rejected)^2 beside it,
            # which keeps scores around 0 (TRL's center_rewards_coefficient).
            "center_coefficient": 0.0,
        },
        # DAPO's soft punishment of overlong responses, in the last `len` tokens of rollout.response_length: less
        # penalty_factor x (tokens in there) / len. It is in critic/rewards, not in critic/score, and no metric of a
        # reward counts it.
        "overlong_buffer": {
            "enable": False,  # True: overlong responses are punished
            "len": 128,  # tokens
            "penalty_factor": 1.0,  # of a response that fills its frame
        },
    }


def _algorithm() -> dict:
    return {
        # gae (with a critic: PPO) | grpo | rloo | reinforce_plus_plus | reinforce_plus_plus_baseline | remax | opo | …,
        # as listed in jaxrl_llm.algorithms.advantages.ESTIMATORS, or module:function
        "estimator": "grpo",
        "gamma": 1.0,  # discount per token, in [0, 1]
        "lam": 1.0,  # lambda of GAE, in [0, 1]
        "scale": "group",  # divide group advantages by the standard deviation of: group | batch | none (Dr. GRPO)
        "epsilon": None,  # added to the estimator's denominator; None: its own (1e-6 to that standard deviation)
        "whiten_advantages": True,  # GAE: advantages to mean 0, variance 1 over the batch's tokens
        "whiten_rewards": False,  # token rewards over their standard deviation in the batch: values of unit scale
        "estimator_kwargs": {},  # further arguments of the estimator
        "use_kl_in_reward": False,  # token rewards less kl_ctrl.kl_coef x KL(old policy, reference)
        "kl_penalty": "k1",  # estimator of that KL: k1 (kl) | abs | k2 (mse) | k3 (low_var_kl)
        "kl_ctrl": {
            "type": "fixed",  # fixed | adaptive (Ziegler et al. 2019)
            "kl_coef": 0.001,  # coefficient, or its first value
            "target_kl": 0.1,  # nats per token that the adaptive one steers to
            "horizon": 10_000,  # rows over which it adapts
        },
        # DAPO's dynamic sampling: prompts whose responses all have the same `metric` teach nothing, and are replaced by
        # the next ones of the data.
        "filter_groups": {
            "enable": False,  # True: they are replaced
            "metric": "score",  # score (the weighted sum), a reward's name, or a value beside its score: "name/acc"
            # Batches of prompts that are sampled at most for a step; then the step goes on with what there is, and
            # filter_groups/unfilled counts the prompts without spread in it.
            "max_num_gen_batches": 10,
        },
        "mask_truncated": False,  # rows that ended by length: no loss on them (their score still counts in the group)
        # Corrects for the sampler's distribution being not quite the scorer's (rho = old / rollout probability).
        "rollout_correction": {
            "rollout_is": "none",  # importance weights per: none | token | sequence
            "rollout_is_threshold": 2.0,  # weights are truncated at this; "low_high" text: set to 0 outside
            "rollout_is_batch_normalize": False,  # divide the weights by their mean over the batch
            "rollout_rs": "none",  # reject by: none, or several of token_k1, seq_mean_k3, … joined by commas
            "rollout_rs_threshold": 0.0,  # bound of each: a number, or for k1 a "low_high" of ratios; joined by commas
            "bypass": False,  # True: old log-probs are the sampler's, no pass of their own
        },
    }


def _actor() -> dict:
    return {
        **_minibatches(),
        # vanilla (PPO's clipped ratio) | gspo | geo_mean | sapo | cispo | gpg | dppo_tv | dppo_kl | dro | clip_cov |
        # kl_cov, as listed in jaxrl_llm.algorithms.losses.POLICY_LOSSES, or module:function
        "policy_loss": "vanilla",
        # None, in the next five: what the chosen loss has as its own; vanilla clips to 0.2 and 0.2 with c = 3.
        "clip_ratio": None,  # the ratio new / old probability is clipped to [1 - low, 1 + high]
        "clip_ratio_low": None,  # None: clip_ratio
        "clip_ratio_high": None,  # None: clip_ratio
        "clip_ratio_c": None,  # dual clip: where the advantage is negative a token loses at most c x |advantage|; > 1
        "loss_agg_mode": None,  # what the loss is divided by: see jaxrl_llm.config.Aggregation; vanilla's: token-mean
        "loss_scale_factor": None,  # denominator of seq-mean-token-sum-norm in tokens; None: rollout.response_length
        "loss_kwargs": {},  # further arguments of the policy loss
        "top_entropy_quantile": 1.0,  # share of the tokens, those of highest entropy, that the policy loss keeps (TRL)
        "entropy_coeff": 0.0,  # of the entropy bonus
        "use_kl_loss": False,  # add kl_loss_coef x KL(new policy, reference) to the loss
        "kl_loss_coef": 0.001,  # of that KL, at least 0
        "kl_loss_type": "low_var_kl",  # k1 | abs | k2 | k3 (low_var_kl), and each with + for k2's gradient
    }


def _critic() -> dict:
    return {
        "enable": "auto",  # auto: when the estimator is gae | yes | no
        # Folder or hub id it starts from, with a fresh value head, or a reward model's, with that model's; "": the
        # actor's.
        "path": "",
        "freeze_trunk": False,  # True: only a value head is trained, on the actor's frozen first parameters
        "warmup_steps": 0,  # steps at the start in which only the critic is trained
        **_minibatches(),
        "cliprange_value": 0.5,  # new values are clipped to old ± this
        "loss_agg_mode": "token-mean",  # of the value loss, as for the actor
        "optimizer": optimizer(lr=1e-5),
    }


def _reference() -> dict:
    return {
        "path": "",  # folder or hub id of the KL reference; "": the actor as it was at the start
        "sync_steps": 0,  # steps after which it is moved to the actor, again and again; 0: it stays as it was
        "sync_alpha": 1.0,  # how far: sync_alpha x actor + (1 - sync_alpha) x reference; in (0, 1]
    }


def _minibatches() -> dict:
    return {
        "mini_batch_size": 0,  # prompts per optimizer update, a divisor of data.train_batch_size; 0: all of them
        "micro_batch_size": 0,  # rows per device at a time, summed up to the mini-batch's gradient; 0: all at once
        "epochs": 1,  # passes over the batch
        "shuffle": True,  # whole prompts, a new order each epoch
    }


def optimizer(lr: float) -> dict:
    """AdamW. Schedules count optimizer updates, not steps."""
    return {
        "lr": lr,  # learning rate after the warm-up
        "schedule": "constant",  # after the warm-up: constant | linear | cosine
        "warmup_steps": 0,  # updates in which the rate rises, the first with lr / warmup_steps
        "decay_steps": 0,  # updates until a decay ends, warm-up included; 0: the whole run
        "min_lr_ratio": 0.0,  # end of a decay, as a fraction of lr
        "b1": 0.9,  # decay of the first moment, in [0, 1)
        "b2": 0.999,  # decay of the second moment, in [0, 1)
        "eps": 1e-8,  # added to the root of the second moment
        "weight_decay": 0.01,  # on matrices, not on norms and biases
        "max_grad_norm": 1.0,  # gradients are scaled down to this global norm; 0: never
    }


def _mesh() -> dict:
    return {  # numbers of devices along each axis; at most one may be -1 and takes what is left
        "data": -1,  # rows
        "fsdp": 1,  # rows, and parameters and moments as well
        "tensor": 1,  # heads, feed-forward width and vocabulary
    }


def _trainer() -> dict:
    return {
        "steps": 100,  # steps of the run
        "epochs": 0,  # passes over the training data, instead of `steps`; 0: steps count
        "log_interval": 1,  # steps between plain lines of progress (metrics.jsonl holds every step)
        "save_interval": 20,  # steps between checkpoints, and one at the end; 0: none at all
        "keep_checkpoints": 2,  # how many of the newest stay
        "keep_best": True,  # of the steps that are saved and evaluated, the one with the highest best_metric stays too
        # A metric's name, as in metrics.jsonl; "": the mean of val-core/SET/reward/mean@N over the held-out sets.
        "best_metric": "",
        # True: a step samples the responses of the next one first, whose slow rewards are worked out while the step
        # updates (docs/speed.md). They are of a policy one step old then, and algorithm.rollout_correction must correct
        # for that: bypass, or rollout_is.
        "one_step_off_policy": False,
        "export": False,  # write the policy to model/ in the run's folder at the end, as jaxrl_llm.export does
        "max_skipped_updates": 5,  # non-finite updates in a row after which the run is aborted
        # Seconds; a phase (also: to start, to compile a program) that takes longer is taken to be stuck: the command
        # writes all stacks to stderr and stacks.txt and exits with 75. 0: any time. Six hours, since a phase that is
        # only slow must not be ended: no step's phase here is known to come near it, and a night is not lost.
        "phase_timeout": 21600.0,
        # Folder where commands keep compiled programs, so that the next start reads them back. auto: jax's own setting
        # (JAX_COMPILATION_CACHE_DIR), else jaxrl_llm/programs in the user's cache folder (~/.cache), 2 GiB at most.
        # "": none. In a notebook jax's own settings count.
        "compilation_cache": "auto",
        # TFLOP/s that one device could do at most, which perf/mfu/… is a share of. -1: the data sheet's (bfloat16) of
        # the chips that jaxrl_llm/chips.py knows; of others, CPUs too, measured once by a product of matrices. 0: no
        # such metrics.
        "device_tflops": -1.0,
        "rollout_dump": False,  # write every response of every step to rollouts/STEP.jsonl
        "sample_interval": 10,  # steps between tables of sample responses; 0: none
        "samples_to_show": 3,  # responses in such a table
        "score_micro_batch_size": 0,  # rows per device at a time in old_log_prob, ref and values; 0: all at once
    }


def _eval() -> dict:
    return {
        "interval": 0,  # steps between evaluations; 0: none in between
        "before": True,  # evaluate before the first step
        "after": True,  # evaluate after the last
        "n": 1,  # responses per prompt; 1 when greedy
        "temperature": 0.0,  # 0: greedy
        "greedy": False,  # a greedy response to each prompt as well, beside n sampled ones (n at least 2)
        "responses": True,  # write every response and its scores to evaluations/STEP.jsonl
        "batch_size": 32,  # prompts at a time
        "max_prompts": 0,  # of each held-out source, the first ones; 0: all
    }


def _logging() -> dict:
    return {
        "name": "",  # of the run; "": the config file's
        "report": True,  # report.html in the run's folder, renewed while the run goes on
        "tensorboard": False,  # event files under the run's folder (needs tensorboardX)
        "wandb": False,  # Weights & Biases (needs wandb)
        "trackio": False,  # trackio, which keeps its data on this machine (needs trackio)
        "project": "jaxrl_llm",  # of wandb and trackio
        "offline": False,  # wandb sends nothing: its files under the run's folder wait for `wandb sync`
        "progress": "auto",  # auto: rich in a terminal, else plain | rich | plain | none
    }
