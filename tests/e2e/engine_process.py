"""One engine in a process of its own: reads its configuration, then prompts, a line of JSON each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from e2e.harness import Engine, set_up


def say(what):
    print("> " + json.dumps(what), flush=True)


def main():
    set_up()
    task = json.loads(sys.stdin.readline())
    if task["options"].get("tensor_parallel_size"):
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    engine = Engine(task["model"], task["transfer"], **task["options"])
    say("ready")
    for line in sys.stdin:
        answers = engine.run(*json.loads(line))
        say(
            {"tokens": [answer.tokens for answer in answers], "cached": [answer.cached for answer in answers]}
        )
    engine.close()


if __name__ == "__main__":
    main()
