#!/usr/bin/env python3
"""The shortest way to use exl3: load a model and complete a text.

python examples/generate.py MODEL_DIRECTORY "Once upon a time"
"""

import sys

from exl3 import Cache, Config, Generator, Job, Model, Tokenizer
from exl3.errors import Exl3Error


def main(directory: str, prompt: str = "Once upon a time") -> None:
    # A model, a cache for 4096 tokens (shared by all jobs), and a tokenizer.
    config = Config.from_directory(directory)
    model = Model.from_config(config)
    cache = Cache(model, max_num_tokens=4096)
    model.load()
    tokenizer = Tokenizer.from_config(config)
    generator = Generator(model, cache, tokenizer)

    # All at once. A list of prompts gives a list of texts, completed together.
    print(generator.generate(prompt, max_new_tokens=60, add_bos=True), "\n")

    # Or as it comes: any number of jobs may be in the queue; every step moves all of them on.
    messages = [{"role": "user", "content": "Name three colours."}]
    job = Job(
        tokenizer.hf_chat_template(messages),
        max_new_tokens=100,
        stop_conditions=config.eos_token_id_list,
        seed=1,
    )
    generator.enqueue(job)
    while generator.num_remaining_jobs():
        for event in generator.iterate():
            print(event.get("text", ""), end="", flush=True)
            if event["eos"]:
                speed = event["new_tokens"] / event["time_generate"]
                print(f"\n({event['new_tokens']} tokens, {speed:.0f} per second)")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (Exl3Error, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
