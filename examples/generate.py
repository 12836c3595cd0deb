#!/usr/bin/env python3
"""The shortest way to use exl3: load a model and complete a text.

python examples/generate.py MODEL_DIRECTORY "Once upon a time"
"""

import sys

from exl3 import Cache, Config, Generator, Job, Model, Tokenizer

directory = sys.argv[1]
prompt = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time"

# A model, a cache for 4096 tokens (shared by all jobs), and a tokenizer.
config = Config.from_directory(directory)
model = Model.from_config(config)
cache = Cache(model, max_num_tokens=4096)
model.load(progressbar=True)
tokenizer = Tokenizer.from_config(config)
generator = Generator(model, cache, tokenizer)

# All at once. A list of prompts gives a list of texts, completed together.
print(generator.generate(prompt, max_new_tokens=60, add_bos=True))
print()

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
