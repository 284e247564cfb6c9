"""Images for which there is little memory, and runs in numbers, over the worker of `test_image_desk`."""

from __future__ import annotations

import numpy as np
from books import check_books
from generating import bytes_held, image_scheduler
from noting import ROWS, Noting, desk_of, engine_of, finish, take

from prefold.spec.requests import Request, Sampling


def test_prompts_with_the_same_images_in_another_order():
    """With room for one image. What one prompt needs last does not keep another from what it needs first."""
    worker = Noting()
    engine = engine_of(worker)
    image_scheduler(engine)._memory = ROWS * 10
    generator, answers = engine.generator, []
    images = [take(image_scheduler(engine).media, name) for name in ("one", "other")]
    for order in (images, images[::-1]):
        tokens = np.concatenate(([1], *(image.ids for image in order), [2])).astype(np.int32)
        generator.add(Request(tokens, sampling=Sampling(max_tokens=2), media=tuple(order)), None, answers.append)
    for _ in range(100):
        generator.step()
        check_books(generator.scheduler)
        assert bytes_held(image_scheduler(engine)) <= ROWS * 10
    assert len(answers) == 2 and not generator.has_work
    assert engine.stats.tower_runs == 3


def test_an_image_that_the_tower_failed_for_in_numbers_is_made_again():
    desk, worker, table, _ = desk_of()
    one = take(table, "one")
    worker.fails = {int(one.ids[0])}
    desk.need([one])
    with desk.using(one.ids):
        assert list(worker.made) == [one.ids[0]], "the step has rows that are no numbers"
    assert not worker.made and not bytes_held(desk)
    worker.fails = set()
    assert finish(desk) is None and desk.holds_rows(one.ids).all()
