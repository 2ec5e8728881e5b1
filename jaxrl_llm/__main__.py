"""`python -m jaxrl_llm`: what there is to run."""

from __future__ import annotations

COMMANDS = {
    "train": "trains a language model by PPO or GRPO",
    "sft": "fine-tunes one on given responses",
    "reward_model": "trains a reward model on pairs of responses",
    "evaluate": "the score of a model or a run on prompts to evaluate on",
    "generate": "samples responses to prompts",
    "export": "writes a run's model as a Hugging Face folder, or its LoRA overlay as an adapter",
    "plan": "memory and time of a step on accelerators, on paper",
    "report": "writes a run's report.html",
    "fetch": "a real small model without a model hub",
}


def main() -> None:
    print("python -m jaxrl_llm.COMMAND --help")
    for name, what in COMMANDS.items():
        print(f"  {name:<13} {what}")


if __name__ == "__main__":
    main()
