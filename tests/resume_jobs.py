"""Training jobs that save, can be killed, and go on; used by the tests and by benchmarks/kill_resume.py."""

import random
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_jobs import tiny_gpt2

from hf_edgc import EDGCCallback, EDGCConfig, EDGCPlugin

STEPS = 24
SAVE_EVERY = 6
CONFIG = EDGCConfig(
    max_rank=6,
    min_rank=1,
    window_steps=5,
    entropy_every=2,
    warmup_fraction=0.1,
    warmup_max_fraction=0.15,
    min_compression_ratio=1.0,
)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def reset_accelerate():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def fingerprint(model, state):
    """A checksum of all that must be bitwise equal on this worker, and the step and ranks reached."""
    value = 0
    named = dict(model.named_parameters()) | state.reducer.feedback.errors
    named |= {f"{name} {key}": tensor for name, slot in state.reducer.slots.items() for key, tensor in slot.items()}
    for name in sorted(named):
        value = zlib.crc32(named[name].detach().contiguous().view(torch.uint8).numpy().data, value)
    controller = state.controller.state_dict()
    totals = {key: number for key, number in vars(state.totals).items() if key != "hook_s"}
    return value, repr(controller), repr(totals)


def tell(directory, step):
    """Note the step reached, for whoever waits to kill us."""
    if dist.get_rank() == 0:
        (Path(directory) / "progress").write_text(str(step))


def accelerate_route(directory, resume=False, slow_s=0.0):
    from accelerate import Accelerator

    reset_accelerate()
    plugin = EDGCPlugin(CONFIG, total_steps=STEPS)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS * 2)
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    first = 0
    if resume:
        newest = max(Path(directory).glob("state-*"), key=lambda path: int(path.name.split("-")[1]))
        accelerator.load_state(str(newest))
        first = int(newest.name.split("-")[1])
        assert plugin.state.controller.step == first
        loader = accelerator.skip_first_batches(loader, first)
    for step, batch in enumerate(loader, start=first):
        if step == STEPS:
            break
        tell(directory, step)
        time.sleep(slow_s)
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            accelerator.save_state(str(Path(directory) / f"state-{step + 1}"))
    return fingerprint(accelerator.unwrap_model(model), plugin.state)


def trainer_route(directory, resume=False, slow_s=0.0, **options):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Progress(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            tell(directory, state.global_step)
            time.sleep(slow_s)

    reset_accelerate()
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        logging_steps=4,
        disable_tqdm=True,
        **options,
    )
    callback = EDGCCallback(CONFIG, report=False)
    trainer = Trainer(
        tiny_gpt2(), arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=[callback, Progress()]
    )
    trainer.train(resume_from_checkpoint=resume)
    return fingerprint(trainer.model, callback.state)


ROUTES = {"accelerate": accelerate_route, "trainer": trainer_route}


def random_kill_step(seed):
    """A step after the first checkpoint that is not the one after which a checkpoint is being written."""
    steps = [step for step in range(SAVE_EVERY + 1, STEPS) if step % SAVE_EVERY != 0]
    return random.Random(seed).choice(steps)


def run_until_killed(pool, route, directory, kill_step, timeout_s=120.0):
    """Start ``route`` on ``pool`` and send SIGKILL to all its workers once ``kill_step`` has begun."""
    pool.start(ROUTES[route], directory=directory, slow_s=0.02)
    progress = Path(directory) / "progress"
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if progress.exists() and int(progress.read_text() or 0) >= kill_step:
            pool.kill()
            reached = int(progress.read_text())
            progress.unlink()
            return reached
        time.sleep(0.002)
    pool.kill()
    raise TimeoutError(f"step {kill_step} was not reached within {timeout_s} s")
