#!/usr/bin/env python3
"""Write stories with questions as anyone's own books would lie: a folder of .txt files and a questions.jsonl.

    MIA_DATA=FOLDER scripts/prepare_books.py fairytaleqa data/fairytales --questions 2000

Only the training split of FairytaleQA is written, and no gold section: evidence is for `mia-train silver` to find.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def fairytales(data: Path) -> list[dict[str, Any]]:
    """Return the training stories: name, text, questions."""
    lines = (data / "fairytaleqa" / "train.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", choices=["fairytaleqa"])
    parser.add_argument("out", type=Path, help="folder to write books/*.txt and questions.jsonl into")
    parser.add_argument("--questions", type=int, help="so many questions, spread evenly; all when left out")
    arguments = parser.parse_args()
    if "MIA_DATA" not in os.environ:
        parser.error("MIA_DATA is not set; name the folder that holds fairytaleqa/ (see README, Data)")
    stories = fairytales(Path(os.environ["MIA_DATA"]))
    books = arguments.out / "books"
    books.mkdir(parents=True, exist_ok=True)
    questions = []
    for story in stories:
        (books / f"{story['story']}.txt").write_text("\n\n".join(story["sections"]) + "\n", encoding="utf-8")
        for i, question in enumerate(story["questions"]):
            answers = [answer for answer in question.get("answers", []) if answer]
            if answers:
                identity = f"{story['story']}:q{i}"
                questions.append(
                    {"id": identity, "question": question["question"], "answer": answers[0], "book": story["story"]}
                )
    wanted = min(arguments.questions or len(questions), len(questions))
    taken = [questions[i * len(questions) // wanted] for i in range(wanted)]
    with (arguments.out / "questions.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(question, ensure_ascii=False) + "\n" for question in taken)
    print(f"{len(stories)} books and {len(taken)} questions in {arguments.out}")


if __name__ == "__main__":
    main()
