"""What survives: kills, other worker counts, other buckets, changed models, damaged files."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from ddp_jobs import GradientModel, average, edgc_ddp, gradients_for, listening, synchronized
from resume_jobs import ROUTES, STEPS, random_kill_step, run_until_killed, trainer_route
from worker_pool import WorkerPool

from hf_edgc import EDGCConfig, checkpoint
from hf_edgc.checkpoint import load_state, save_state
from hf_edgc.memory import expected_memory, measured_memory

SHAPES = {"a": (64, 48), "bias": (48,), "b": (80, 40), "c": (40, 72)}
OPTIONS = {"max_rank": 4, "min_rank": 1, "window_steps": 3, "entropy_every": 1, "min_compression_ratio": 1.0}


@pytest.mark.fault("training is killed with SIGKILL and resumed", "the result is bitwise that of the run left alone")
@pytest.mark.parametrize("route", list(ROUTES))
def test_resume_after_sigkill_is_bitwise_the_uninterrupted_run(run_workers, tmp_path, route):
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    for directory in (reference, killed):
        directory.mkdir()
    expected = run_workers(ROUTES[route], directory=str(reference), timeout_s=120)
    victims = WorkerPool(2)
    reached = run_until_killed(victims, route, str(killed), random_kill_step(seed=route))
    assert reached < STEPS
    resumed = run_workers(ROUTES[route], directory=str(killed), resume=True, timeout_s=120)
    assert resumed == expected
    # The errors are the workers' own, so what must agree bitwise over the restart differs between the workers.
    assert resumed[0][0] != resumed[1][0] and resumed[0][1:] == resumed[1][1:]
    if route == "trainer":
        records = [json.loads(line) for line in (killed / "edgc_steps.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == list(range(STEPS))


def test_trainers_rotation_and_best_model(run_workers, tmp_path):
    options = {"save_total_limit": 2, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 6}
    run_workers(trainer_route, directory=str(tmp_path), timeout_s=120, **options)
    left = sorted(tmp_path.glob("checkpoint-*"))
    assert len(left) == 2
    for folder in left:
        step = int(folder.name.split("-")[1])
        assert {path.name for path in folder.glob("*edgc*")} == {
            "edgc_0_shared.safetensors",
            f"edgc_0_step_{step}_worker_0.safetensors",
            f"edgc_0_step_{step}_worker_1.safetensors",
        }


def train_and_save(directory, steps=7, shapes=None, first=0, load=False, save=True, total_steps=30, **options):
    """Errors averaged over the workers times their count, controller, results of the steps."""
    shapes = shapes or SHAPES
    bucket_cap_mb = options.pop("bucket_cap_mb", 25)
    config = EDGCConfig(**{**OPTIONS, **options})
    with edgc_ddp(GradientModel(shapes), config, total_steps, bucket_cap_mb=bucket_cap_mb) as (ddp, state):
        with listening() as told:
            loaded = load_state(state, directory) if load else None
        found = {
            name: average(error) * state.exchange.workers
            for name, error in sorted(state.reducer.feedback.errors.items())
        }
        at = (state.controller.step, state.controller.rank, state.totals.steps)
        results = [synchronized(ddp, gradients_for(shapes, step)) for step in range(first, first + steps)]
        if save:
            save_state(state, directory)
        sums = {
            name: average(error) * state.exchange.workers
            for name, error in sorted(state.reducer.feedback.errors.items())
        }
        ranks = state.last.ranks if state.last else ()
        memory = (expected_memory(state), measured_memory(state))
    return {
        "loaded": loaded,
        "at": at,
        "found": found,
        "sums": sums,
        "results": results,
        "ranks": ranks,
        "memory": memory,
        "told": told,
    }


@pytest.mark.parametrize("before, after", [(2, 1), (2, 4), (4, 2)])
def test_another_worker_count_keeps_the_sum_of_the_errors(run_workers, tmp_path, before, after):
    saved = run_workers(train_and_save, workers=before, directory=str(tmp_path))
    loaded = run_workers(train_and_save, workers=after, directory=str(tmp_path), first=7, load=True)
    assert len(saved) == before and len(loaded) == after
    for worker in loaded:
        assert worker["loaded"] and worker["at"][0] == 7 and worker["at"][2] == 7
        for name, total in saved[0]["sums"].items():
            assert total.abs().max() > 1.0, "the noise of the gradients is in the errors"
            torch.testing.assert_close(worker["found"][name], total, rtol=1e-5, atol=1e-5 * total.abs().max().item())
    for left, right in zip(loaded[0]["results"], loaded[-1]["results"], strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_other_buckets_change_nothing(run_workers, tmp_path):
    run_workers(train_and_save, directory=str(tmp_path))
    one = run_workers(train_and_save, directory=str(tmp_path), first=7, load=True, save=False)
    many = run_workers(train_and_save, directory=str(tmp_path), first=7, load=True, save=False, bucket_cap_mb=0.01)
    for left, right in zip(one[0]["results"], many[0]["results"], strict=True):
        assert all(torch.equal(left[name], right[name]) for name in SHAPES)


@pytest.mark.fault(
    "the state is that of another model", "what fits by name and shape is used, the rest dropped and named"
)
def test_only_the_slot_of_a_changed_parameter_is_dropped(run_workers, tmp_path):
    saved = run_workers(train_and_save, directory=str(tmp_path))
    shapes = {"a": (64, 48), "b": (80, 44), "new": (64, 64), "bias": (48,)}
    workers = run_workers(train_and_save, directory=str(tmp_path), first=7, load=True, shapes=shapes)
    assert [len(worker["told"]) for worker in workers] == [1, 0], "said once"
    assert "are dropped: weights.b, weights.c" in workers[0]["told"][0]
    for worker in workers:
        assert worker["loaded"] and worker["at"][0] == 7
        assert list(worker["found"]) == ["weights.a"]
        torch.testing.assert_close(worker["found"]["weights.a"], saved[0]["sums"]["weights.a"])
        assert len(worker["ranks"]) == 3


def test_other_options_keep_errors_and_step_and_start_their_own_ranks(run_workers, tmp_path):
    saved = run_workers(train_and_save, directory=str(tmp_path))
    workers = run_workers(train_and_save, directory=str(tmp_path), first=7, load=True, max_rank=8, rank=2)
    assert "EDGC options differ (rank None -> 2, max_rank 4 -> 8)" in workers[0]["told"][0]
    for worker in workers:
        assert worker["at"][:2] == (7, 2)
        torch.testing.assert_close(worker["found"]["weights.a"], saved[0]["sums"]["weights.a"])


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was executed')",))


def damage(directory, kind):
    """Make one of the files unusable; what the message must say."""
    worker = next(Path(directory).glob("*worker_1*"))
    shared = Path(directory) / "edgc_0_shared.safetensors"
    if kind == "missing":
        shared.unlink()
        return "FileNotFoundError"
    if kind == "worker missing":
        worker.unlink()
        return "worker 1 could not read its part"
    if kind == "truncated":
        worker.write_bytes(worker.read_bytes()[:-100])
        return "worker 1 could not read its part"
    if kind == "random bytes":
        shared.write_bytes(torch.randint(256, (5000,)).to(torch.uint8).numpy().tobytes())
        return "SafetensorError"
    if kind == "pickle":
        shared.write_bytes(pickle.dumps(Bomb()))
        return "SafetensorError"
    if kind == "flipped bits":
        content = bytearray(shared.read_bytes())
        content[-10] ^= 0xFF
        shared.write_bytes(content)
        return "its checksum does not match"
    if kind == "other version":
        text = shared.read_bytes()
        shared.write_bytes(text.replace(b'\\"format\\": 2', b'\\"format\\": 9'))
        return "has format 9, this release reads 2"
    if kind == "changed number":  # in the JSON beside the tensors
        rank, other = rb"\"rank\": 4,", rb"\"rank\": 3,"
        assert shared.read_bytes().count(rank) == 1
        shared.write_bytes(shared.read_bytes().replace(rank, other))
        return "its checksum does not match"
    if kind == "other fields":
        tensors, header = checkpoint.read_file(shared)
        header["controller"]["later_field"] = header["controller"].pop("window_position")
        checkpoint._try_write(shared, {name: tensor.clone() for name, tensor in tensors.items()}, header)
        return "controller state does not fit this version"
    assert kind == "not ours"
    from safetensors.torch import save_file

    save_file({"x": torch.ones(3)}, shared)
    return "was not written by hf_edgc"


KINDS = [
    "missing", "worker missing", "truncated", "random bytes", "pickle", "flipped bits", "other version", "not ours",
    "other fields", "changed number",
]  # fmt: skip


def load_from_own_disk(folders):
    import torch.distributed as dist

    return load_damaged(folders[dist.get_rank()], require_state=False)


@pytest.mark.fault("hosts with disks of their own hold states of different steps", "a warning; all start fresh")
def test_states_of_different_steps_on_different_hosts_are_not_mixed(run_workers, tmp_path):
    for steps in (4, 6):
        run_workers(train_and_save, directory=str(tmp_path / str(steps)), steps=steps)
    for at, told in run_workers(load_from_own_disk, folders=[str(tmp_path / "4"), str(tmp_path / "6")]):
        assert at == (0, 4, 0)
        assert not told or "it differs between hosts" in told[0]


def load_damaged(directory, require_state):
    try:
        result = train_and_save(directory, steps=1, load=True, save=False, require_state=require_state)
        return result["at"], result["told"]
    except RuntimeError as error:
        return str(error)


@pytest.mark.fault(
    "a state file is missing, truncated, random bytes, of another version, a renamed pickle, changed in a digit",
    "a warning with the reason and a fresh state, or a stop with require_state; nothing is executed",
)
def test_an_unusable_state_is_named_and_training_goes_on_fresh_or_stops(run_workers, tmp_path):
    good = tmp_path / "good"
    run_workers(train_and_save, directory=str(good))
    for kind in KINDS:
        bad = tmp_path / kind
        shutil.copytree(good, bad)
        words = damage(bad, kind)
        results = run_workers(load_damaged, directory=str(bad), require_state=False)
        assert [at for at, _ in results] == [(0, 4, 0)] * 2, kind
        assert words in results[0][1][0] and "going on with a fresh one" in results[0][1][0], kind
        for message in run_workers(load_damaged, directory=str(bad), require_state=True):
            assert message.startswith("No usable EDGC state") and "require_state is set" in message, kind


@pytest.mark.fault("a kill while the state is being saved", "the state saved before is used")
def test_a_kill_while_saving_leaves_the_last_state_usable(run_workers, tmp_path):
    run_workers(train_and_save, directory=str(tmp_path))
    later = tmp_path / "later"
    run_workers(train_and_save, directory=str(later), steps=9)
    # Worker 0 had written its next file, worker 1 was still at it, and the shared file had not been replaced.
    shutil.copy(later / "edgc_0_step_9_worker_0.safetensors", tmp_path)
    (tmp_path / ".edgc_0_step_9_worker_1.safetensors.123").write_bytes(b"half a file")
    for worker in run_workers(train_and_save, directory=str(tmp_path), first=7, load=True):
        assert worker["loaded"] and worker["at"][0] == 7
    assert sorted(path.name for path in tmp_path.glob("edgc_0_step_*")) == [
        "edgc_0_step_14_worker_0.safetensors",
        "edgc_0_step_14_worker_1.safetensors",
    ], "files of earlier steps are removed once the new state is complete"


@pytest.mark.parametrize(
    "options", [{}, {"error_dtype": "bfloat16"}, {"error_device": "cpu"}, {"factor_dtype": "bfloat16"}]
)
def test_memory_is_what_is_announced(run_workers, tmp_path, options):
    for worker in run_workers(train_and_save, directory=str(tmp_path), steps=3, **options):
        expected, measured = worker["memory"]
        assert measured == expected
    elements = 64 * 48 + 80 * 40 + 40 * 72
    assert measured.errors == elements * (2 if "error_dtype" in options else 4)


def test_bfloat16_errors_resume_bitwise(run_workers, tmp_path):
    whole = run_workers(train_and_save, directory=str(tmp_path / "x"), steps=10, error_dtype="bfloat16")
    run_workers(train_and_save, directory=str(tmp_path / "y"), error_dtype="bfloat16")
    rest = run_workers(
        train_and_save, directory=str(tmp_path / "y"), steps=3, first=7, load=True, error_dtype="bfloat16"
    )
    for left, right in zip(whole[1]["results"][7:], rest[1]["results"], strict=True):
        assert all(torch.equal(left[name], right[name]) for name in SHAPES)


def save_in_groups(directory):
    """Workers 0 and 1 train one model, worker 2 another; all save into one folder and read it back."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from hf_edgc import EDGCState, edgc_hook

    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    group = groups[dist.get_rank() == 2]
    fresh = EDGCState(EDGCConfig(**OPTIONS), GradientModel(SHAPES).named_parameters(), group, 30)
    model = GradientModel(SHAPES)
    trained = EDGCState(EDGCConfig(**OPTIONS), model.named_parameters(), group, 30)
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(trained, edgc_hook)
    for step in range(4 if dist.get_rank() == 2 else 2):
        synchronized(ddp, gradients_for(SHAPES, step))
    save_state(trained, directory)
    loaded = load_state(fresh, directory)
    errors = trained.reducer.feedback.errors
    same = all(torch.equal(errors[name], fresh.reducer.feedback.errors[name]) for name in errors)
    del ddp
    return loaded, same and len(errors) > 0, fresh.controller.step


def test_process_groups_keep_their_states_apart(run_workers, tmp_path):
    assert run_workers(save_in_groups, workers=3, directory=str(tmp_path)) == [
        (True, True, 2),
        (True, True, 2),
        (True, True, 4),
    ]
    assert {path.name for path in tmp_path.glob("*shared*")} == {
        "edgc_0_group_0_shared.safetensors",
        "edgc_0_group_2_shared.safetensors",
    }
