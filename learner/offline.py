"""Training on files: `sft`. The same trainer, without generators."""

import logging
import sys
import time
from functools import partial

import transformers

from learner.config import LearnerConfig
from learner.data.examples import batches, read_examples
from learner.trainer_thread import TrainerThread
from learner.training.trainer import Trainer
from learner.training_setup import open_trainer
from services.process import Stop

log = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 5.0


async def train_offline(config: LearnerConfig, stop: Stop) -> None:
    """Trains `steps` batches and exports the model."""
    async with TrainerThread() as thread:
        opened = await thread.run(partial(open_trainer, config, argv=sys.argv, should_stop=thread.stopping))
        try:
            await thread.run(partial(_train, config, opened.trainer))
        finally:
            opened.close()


def _train(config: LearnerConfig, trainer: Trainer) -> None:
    assert config.data.path is not None, "checked by the config"
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    examples = read_examples(config.data.path, tokenizer)
    log.info("%s on %d examples, %d steps of %d", config.algo.type, len(examples), config.steps, config.data.batch_size)
    order = batches(examples, size=config.data.batch_size, seed=config.data.seed)
    began = said = time.monotonic()
    for step in range(1, config.steps + 1):
        metrics = trainer.train_step(next(order), version=step - 1)
        now = time.monotonic()
        if now - said > _PROGRESS_EVERY_S or step == config.steps:
            left_s = (config.steps - step) * (now - began) / step
            log.info("step %d/%d  loss %.4f  ETA %.0f s", step, config.steps, metrics.loss, left_s)
            said = now
    trainer.export(config.exported_model)
    trainer.close()
    log.info("the trained model is in %s", config.exported_model)
