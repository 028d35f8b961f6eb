"""List scheduling: when each of many jobs runs, if every mesh takes the first of its jobs that can run."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Jobs(NamedTuple):
    """Jobs 0 to n - 1.

    Attributes:
      meshes: for each job, the mesh that runs it, one job at a time.
      costs: for each job, how long it takes.
      waits: for each job, the jobs that must have finished before it starts.
      rows: jobs of one mesh that run in this order.
      early: jobs in no row that go ahead of those in rows when they can. All others fill idle time.
    """

    meshes: Sequence[Hashable]
    costs: Sequence[float]
    waits: Sequence[Sequence[int]]
    rows: Sequence[Sequence[int]]
    early: frozenset[int] = frozenset()


class Stuck(ValueError):
    """No job can start. `heads` are the next jobs of the rows, `left` all that did not run."""

    def __init__(self, heads: list[int], left: list[int]):
        super().__init__(f"{len(left)} jobs wait for each other")
        self.heads, self.left = heads, left


def play(jobs: Jobs) -> list[tuple[float, int]]:
    """Plays all jobs through.

    Returns:
      (start, job) for every job, in the order in which they start.

    Raises:
      Stuck: if jobs wait for each other.
    """
    count = len(jobs.meshes)
    number = {mesh: n for n, mesh in enumerate(dict.fromkeys(jobs.meshes))}
    on = [number[mesh] for mesh in jobs.meshes]
    rows: list[list[deque[int]]] = [[] for _ in number]
    row_of: list[deque[int] | None] = [None] * count
    for row in map(deque, jobs.rows):
        if row:
            rows[on[row[0]]].append(row)
        for job in row:
            row_of[job] = row
    waiting = [len(needed) for needed in jobs.waits]
    followers: list[list[int]] = [[] for _ in range(count)]
    for job, needed in enumerate(jobs.waits):
        for before in needed:
            followers[before].append(job)
    ready = [0.0] * count  # when the last job that a job waits for ends
    idle = [0.0] * len(number)  # when each mesh is done with what it has begun
    early: list[list[tuple[float, int]]] = [[] for _ in number]  # (ready, job), as heaps
    late: list[list[tuple[float, int]]] = [[] for _ in number]
    # What each mesh would run next: (start, mesh, version, rank, job). The last two are those of `choose`.
    offers: list[tuple[float, int, int, int, int]] = []
    version = [0] * len(number)

    def choose(mesh: int) -> tuple[float, int, int] | None:
        """(start, rank, job) of the job that the mesh would start first; rank 0 for early, 1 row, 2 late."""
        now = idle[mesh]
        found = [(max(now, ready[row[0]]), 1, row[0]) for row in rows[mesh] if row and not waiting[row[0]]]
        for rank, heap in ((0, early[mesh]), (2, late[mesh])):
            if heap:
                found.append((max(now, heap[0][0]), rank, heap[0][1]))
        return min(found, default=None)

    def offer(mesh: int) -> None:
        version[mesh] += 1
        choice = choose(mesh)
        if choice is not None:
            start, rank, job = choice
            heapq.heappush(offers, (start, mesh, version[mesh], rank, job))

    def release(job: int) -> bool:
        """Makes a job available; returns whether its mesh may now choose another one."""
        if (row := row_of[job]) is not None:
            return row[0] == job
        heap = early if job in jobs.early else late
        heapq.heappush(heap[on[job]], (ready[job], job))
        return True

    for job in range(count):
        if not waiting[job]:
            release(job)
    for mesh in range(len(number)):
        offer(mesh)
    order: list[tuple[float, int]] = []
    while offers:
        start, mesh, made, rank, job = heapq.heappop(offers)
        if made != version[mesh]:
            continue  # it has made another offer since
        if (own_row := row_of[job]) is not None:
            own_row.popleft()
        else:
            heapq.heappop((early if rank == 0 else late)[mesh])
        order.append((start, job))
        idle[mesh] = end = start + jobs.costs[job]
        changed = {mesh}
        for follower in followers[job]:
            waiting[follower] -= 1
            if end > ready[follower]:
                ready[follower] = end
            if not waiting[follower] and release(follower):
                changed.add(on[follower])
        for other in changed:
            offer(other)
    if len(order) < count:
        done = {job for _, job in order}
        heads = [row[0] for mine in rows for row in mine if row]
        raise Stuck(heads, [job for job in range(count) if job not in done])
    return order
