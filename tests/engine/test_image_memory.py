"""Images for which there is little memory, over the worker of `test_image_desk`."""

from __future__ import annotations

import numpy as np
from test_image_desk import ROWS, Noting, engine_of, take

from prefold.types import Request, Sampling


def test_prompts_with_the_same_images_in_another_order():
    """With room for one image. What one prompt needs last does not keep another from what it needs first."""
    worker = Noting()
    engine = engine_of(worker)
    engine.images._memory = ROWS * 10
    generator, answers = engine.generator, []
    images = [take(engine.media, name) for name in ("one", "other")]
    for order in (images, images[::-1]):
        tokens = np.concatenate(([1], *(image.ids for image in order), [2])).astype(np.int32)
        generator.add(Request(tokens, sampling=Sampling(max_tokens=2), media=tuple(order)), None, answers.append)
    for _ in range(100):
        generator.step()
        generator.scheduler.check()
        assert engine.images.bytes_held <= ROWS * 10
    assert len(answers) == 2 and not generator.has_work
    assert engine.stats.tower_runs == 3
