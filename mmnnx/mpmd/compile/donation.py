"""Who decides that a buffer is donated: which inputs of a fragment XLA may overwrite with its results.

1. `ir.buffers.buffer_reuse` pairs inputs with results: those that every call of the fragment reads last, with
   a result that is the next value of the same state or sum, else with one of the same type.
2. `runtime.arguments.bind_inputs` says which arguments of the function may be overwritten: those that the
   caller donates and that reach the program as they are.
3. `find_donations`, here, drops the pairs that must not be, and `lower` hands the rest to JAX.
4. `runtime.donated_arguments` deletes, after a call, donated arguments whose buffer no result took over.

Where `runtime.as_is` says that JAX alone does, no program runs, and JAX decides.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import NamedSharding

from mmnnx.mpmd.distributed.processes import span_processes
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar
from mmnnx.mpmd.ir.instructions import Call
from mmnnx.mpmd.ir.program import Program

Donations = list[tuple[int, int]]  # (number of an input, number of the result that takes over its buffer)


def find_donations(
    program: Program, fixed: Mapping[PlacedVar, NamedSharding], donated: set[int]
) -> dict[Fragment, Donations]:
    """For each fragment, the inputs that are donated: of `Program.overwrites` those that may be.

    Not arguments that the caller keeps, and nothing that goes to another process or comes from there. Input
    and result must have the same sharding, as far as it is decided; where XLA decides it, XLA decides whether
    it uses the buffer, too.

    Args:
      program: the fragments with their calls.
      fixed: shardings that are decided.
      donated: input buffers of the program whose arrays may be overwritten.
    """
    # Another process fetches an array when it comes to it: nothing may be written over it. What it sent was
    # received into memory that is no device's own, on some clients, and the watchdog may look at it.
    remote = [t for t in program.transfers if span_processes(t.source_mesh, t.target_mesh)]
    sent = program.moved(s for t in remote for s in (*t.inputs, *t.outputs))
    kept = sent | (program.inputs.keys() - donated)
    kept_inputs: dict[Fragment, set[int]] = {}
    first_call: dict[Fragment, Call] = {}
    for call in program.calls:
        first_call.setdefault(call.fragment, call)
        mine = (n for n, s in enumerate(call.inputs) if s in kept)
        kept_inputs.setdefault(call.fragment, set()).update(mine)

    def may_donate(f: Fragment, n: int, k: int) -> bool:
        call = first_call[f]
        given, made = (fixed.get(program.values[s]) for s in (call.inputs[n], call.outputs[k]))
        fits = made is None or (given is not None and given.is_equivalent_to(made, f.outvars[k].aval.ndim))
        return fits and n not in kept_inputs[f]

    return {f: [pair for pair in pairs if may_donate(f, *pair)] for f, pairs in program.overwrites.items()}
