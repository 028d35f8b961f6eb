"""When a process fails, every other one says which, how and where, and ends; none is left."""

from __future__ import annotations

import re
import subprocess
import threading
import time

import pytest
from flax import nnx

from mmnnx.train.checkpoint import Checkpoints
from tests.processes.harness import finish, start
from tests.slow import all_but


class Run:
    """The processes of `fail.py`, and when each of them ended."""

    def __init__(self, count, how, victim, seed=0, missing=(), folder=""):
        began = time.time()
        self.processes = start("fail.py", count, 1, how, str(victim), str(seed), str(folder), without=missing)
        self.ends: dict[int, float] = {}
        watchers = [threading.Thread(target=self._watch, args=item) for item in enumerate(self.processes)]
        for watcher in watchers:
            watcher.start()
        if how == "SIGSTOP":  # it can end no more by itself
            threading.Thread(target=self._kill_the_last, args=(victim,), daemon=True).start()
        self.results = finish(self.processes, timeout=90)
        for watcher in watchers:
            watcher.join()
        started = [float(t) for _, text in self.results for t in re.findall(r"started (\d\S+)", text)]
        self.took = max(end for n, end in self.ends.items() if (n, how) != (victim, "SIGSTOP")) - max(
            started, default=began
        )

    def _watch(self, number: int, process: subprocess.Popen[str]) -> None:
        process.wait()
        self.ends[number] = time.time()

    def _kill_the_last(self, victim: int) -> None:
        while len(self.ends) < len(self.processes) - 1:
            time.sleep(0.05)
        self.processes[victim].kill()

    def survivors(self, victim: int) -> list[tuple[int, str]]:
        """(exit status, the message) of each process but one."""
        return [
            (status, "".join(line for line in text.splitlines() if line.startswith("mmnnx: ")))
            for n, (status, text) in enumerate(self.results)
            if n != victim
        ]


@pytest.mark.parametrize("victim, seed", all_but([(0, 0)], [(0, 0), (1, 1), (2, 2)]))
def test_a_process_that_is_killed_brings_the_others_down(victim, seed):
    """Wherever in a step it was; process 0, where JAX's coordinator is, as any other."""
    run = Run(3, "SIGKILL", victim, seed)
    assert run.results[victim][0] == -9
    for status, message in run.survivors(victim):
        assert status == 1
        assert re.search(rf"process {victim} \(\S+, pid {run.processes[victim].pid}\) died", message)
        assert re.search(r"last heard of at (the|instruction \d+ of) \w+", message)
        assert message.count("mmnnx:") == 1


@pytest.mark.slow
def test_a_process_that_is_stopped_is_missed():
    """After the failure_timeout of 4 s, and no sooner."""
    run = Run(3, "SIGSTOP", 1)
    assert run.took > 3.5
    for status, message in run.survivors(1):
        assert status == 1
        assert f"pid {run.processes[1].pid}) has not been heard of for 4 s" in message


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_is_missed():
    run = Run(2, "SIGSTOP", 0)
    assert run.took > 3.5
    assert run.survivors(0)[0][0] == 1
    assert "process 0 (" in run.survivors(0)[0][1] and "for 4 s" in run.survivors(0)[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_raises_says_what(victim):
    """It shows its traceback, the others the error in a line."""
    run = Run(2, "raise", victim)
    assert run.results[victim][0] == 1
    assert "Traceback" in run.results[victim][1]
    (status, message), text = run.survivors(victim)[0], run.results[1 - victim][1]
    assert status == 1
    assert f"process {victim} (" in message
    assert "raised ValueError: the dog ate the batch. It was at the end of call 21 of" in message
    assert "Traceback" not in text


@pytest.mark.slow
def test_a_process_that_raises_while_it_saves_waits_for_its_own_checkpoint_alone(tmp_path):
    """The others are in a step, and would come to the end of their `with` after it."""
    run = Run(2, "raise while it saves", 1, folder=tmp_path)
    assert run.results[1][0] == 1
    assert "Traceback" in run.results[1][1] and "ValueError: the dog ate the batch" in run.results[1][1]
    ((status, message),) = run.survivors(1)
    assert status == 1
    assert "process 1 (" in message and "raised ValueError: the dog ate the batch. It was at " in message
    assert "Traceback" not in run.results[0][1]
    assert run.took < 30  # and not the timeout of 60 s
    assert Checkpoints(tmp_path).latest == 1


@pytest.mark.slow
def test_a_transfer_that_is_cut_names_its_ends():
    """The two processes, the instruction and the array; not those that wait for the result of all."""
    run = Run(3, "cut", 0)
    assert run.took > 4.5
    for status, message in run.survivors(-1):
        assert status == 1
        assert re.search(
            r"process 0 \(.*\) has not sent an array float32\[1000\] \(instruction 1 of call 10 of .*: "
            r"send float32\[1000\] stage0 -> stage1, .*\), for which process 1 \(.*\) has waited 5 s",
            message,
        )


@pytest.mark.slow
def test_a_process_that_has_another_batch_builds_a_program_alone():
    """As with the last rows of its data: the others run the program that they know, and wait. What is told is
    that, or that it waits for them to build it too, whichever is noticed first."""
    run = Run(2, "shape", 1)
    for status, message in run.survivors(-1):
        assert status == 1
        alone = "the building of program 2, of step for arguments that it had not had before"
        assert alone in message or "has not sent its 'program 2'" in message


@pytest.mark.slow
def test_a_function_that_one_process_calls_alone_is_not_given_what_the_others_send():
    run = Run(2, "alone", 1)
    for status, message in run.survivors(-1):
        assert status == 1
        assert "has not sent an array float32[1000] (instruction 1 of call " in message


@pytest.mark.slow
@pytest.mark.parametrize("how, victim", [("early", 0), ("exit", 1)])
def test_a_process_that_ends_before_the_others_is_told_from_one_that_died(how, victim):
    """It has no error to show, and nobody waits for it until the timeout of 60 s."""
    run = Run(2, how, victim)
    for status, message in run.survivors(-1):
        assert status == 1
        assert re.search(
            rf"process {victim} \(.*\) has ended, and process {1 - victim} .* waits for", message
        )


@pytest.mark.slow
def test_a_process_that_fetches_alone():
    """It has the array, and waits for nobody; the others would get it for what they fetch next."""
    run = Run(2, "fetch", 1)
    for status, message in run.survivors(-1):
        assert status == 1
        assert (
            "mm.fetch: process 1 fetches float32[1000] at the end of call 21 of step, and process 0 "
            "float32[1000] at the end of call 22 of step" in message
        )


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_checkpoint_that_one_process_saves_alone(tmp_path, victim):
    """As in `if jax.process_index() == 0:`. The others may come to it late, but they must come."""
    run = Run(2, "save", victim, folder=tmp_path)
    for status, message in run.survivors(-1):
        assert status == 1
        assert re.search(
            rf"process {1 - victim} \(.*\) has ended, and process {victim} \(.*\) still waits for it to save "
            "or restore a checkpoint, as every process must",
            message,
        )
    assert Checkpoints(tmp_path).latest is None


@pytest.mark.slow
def test_processes_that_close_no_checkpoints_write_them(tmp_path):
    run = Run(2, "save all", 0, folder=tmp_path)
    assert [status for status, _ in run.results] == [0, 0], run.results
    assert Checkpoints(tmp_path).restore({"rngs": nnx.Rngs(1)}).step == 1


@pytest.mark.slow
def test_processes_that_save_other_steps(tmp_path):
    run = Run(2, "save other steps", 0, folder=tmp_path)
    for status, text in run.results:
        assert status == 1
        assert "process 0 saves rngs at step 0, and process 1 saves rngs at step 1: every" in text
    assert not Checkpoints(tmp_path).steps


@pytest.mark.slow
def test_processes_that_have_other_values_of_what_is_not_placed():
    """As of a batch, of which each reads its own part."""
    for status, text in Run(2, "values", 1).results:
        assert "refused: argument 0 of step has other values in process 1 than in process 0" in text
        assert status == 0, text


@pytest.mark.slow
def test_processes_that_do_not_see_one_folder_save_no_checkpoint(tmp_path):
    """Each would write its part to a disk of its own, and none could be read."""
    run = Run(2, "unshared", 0, folder=tmp_path)
    for number, (status, text) in enumerate(run.results):
        assert status == 1
        assert f"{tmp_path}/1 of this host is not that of process 0" in text
        assert not Checkpoints(tmp_path / str(number)).steps


@pytest.mark.slow
def test_processes_that_finish_together_say_nothing():
    run = Run(2, "well", 0)
    assert [(status, message) for status, message in run.survivors(-1)] == [(0, ""), (0, "")]
