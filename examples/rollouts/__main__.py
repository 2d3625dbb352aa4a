"""``python -m examples.rollouts train | recall --out DIR``: run, print, and leave numbers and pictures.

``train``   three arms of a small GRPO loop: ``train.jsonl``, ``train.png``
``recall``  whether a fact is known after its tokens were cut: ``recall.jsonl``, ``recall.png``
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples.rollouts import pictures, recall, tables, training


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(1)  # the toys are too small for two
    options.out.mkdir(parents=True, exist_ok=True)
    changes = {"seed": options.seed} | ({} if options.steps is None else {"steps": options.steps})
    lines, picture = (options.out / f"{options.experiment}.{suffix}" for suffix in ("jsonl", "png"))
    if options.experiment == "train":
        if options.lessons is not None:
            changes["lessons_max"] = options.lessons
        trained = training.train(replace(training.QUICK if options.quick else training.Settings(), **changes))
        records = _kept(trained, lines)
        pictures.draw_training(records, picture)
        print(tables.training_table(records))
    else:
        asked = recall.measure(replace(recall.QUICK if options.quick else recall.Settings(), **changes))
        records = _kept(asked, lines)
        pictures.draw_recall(records, picture)
        print(tables.recall_table(records))
    print(f"{lines} and {picture}")
    return 0


def _kept(records: Iterable[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Shown and written as they come."""
    found = []
    with path.open("w") as lines:
        for record in records:
            record = {name: _rounded(value) for name, value in record.items()}
            found.append(record)
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            print(_line(record), flush=True)
    return found


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


_SHOWN = {
    "arm": "{:<13}",
    "step": "step {:<3}",
    "lessons": "after {} lessons:",
    "reward": "reward {:.2f}",
    "recall": "recall {:.2f}",
    "entropy_nats": "entropy {:.2f}",
    "mismatch_nats": "mismatch {:.1e}",
    "forgetful_nats": "(events forgotten {:.1e})",
    "rows_fed": "rows fed {}",
    "rows_again": "again {}",
    "generate_s": "{:.2f} s +",
    "learn_s": "{:.2f} s",
    "condition": "{:<36}",
}


def _line(record: dict[str, Any]) -> str:
    order = ("condition", *(name for name in _SHOWN if name != "condition"))
    return "  ".join(_SHOWN[name].format(record[name]) for name in order if name in record)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.rollouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", choices=("train", "recall"))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    parser.add_argument("--steps", type=int, metavar="N", help="of training: an arm's, or a condition's")
    parser.add_argument("--lessons", type=int, metavar="N", help="of teaching before, at most; 0 = none")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--quick", action="store_true", help="small: does it run at all?")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
