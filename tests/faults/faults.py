"""Seeded faults: small mistakes that somebody might make, one in nearly every file of the compiler.

Each is a change of one to three lines, which at least one test has to notice. `python -m tests.faults` makes
them one at a time in a copy of the tree and runs tests there. What a fault changes, a user could see: values,
state and where it lives, transfers, memory, an error that is not raised, or a hang.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
      name: what it is called, in words joined by hyphens.
      file: where it is made, relative to the root of the repository.
      old: the text that is replaced, which is there exactly once.
      new: what it is replaced by.
      what: what goes wrong then.
      tests: those that are expected to notice, as pytest is given them.
    """

    name: str
    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...]


FAULTS: tuple[Fault, ...] = (
    # frontend
    Fault(
        name="catch-all-rule-takes-optimizer-state",
        file="mmnnx/mpmd/frontend/in_out_shardings.py",
        old="return follow, of_owner or rule if inherited else rule or of_owner",
        new="return follow, rule or of_owner",
        what=(
            "Slots of an optimizer go where the rule for all that is left says, and not to their parameters."
        ),
        tests=(
            "tests/mpmd/frontend/test_optimizer_state.py::test_a_rule_for_all_that_is_left_is_not_for_slots",
        ),
    ),
    Fault(
        name="optimizer-state-of-two-alike-networks",
        file="mmnnx/mpmd/frontend/optimizer_state.py",
        old="if len(next(known, ())) > 1:",
        new="if len(next(known, ())) > 2:",
        what=(
            "Where two networks have the same paths, nobody asks whose optimizer state those of a new "
            "optimizer are."
        ),
        tests=("tests/mpmd/frontend/test_optimizer_state.py::test_of_two_models_whose_paths_are_alike",),
    ),
    Fault(
        name="alike-variables-share-an-array",
        file="mmnnx/mpmd/frontend/own_arrays.py",
        old="if len(own) == len(jax.tree.leaves(tree)) and taken.isdisjoint(own):",
        new="if len(own) == len(jax.tree.leaves(tree)):",
        what=(
            "A Variable that a function gives the array of another one is taken for that one, and loses "
            "its home and updates."
        ),
        tests=("tests/mpmd/jit/test_aliases.py::test_each_call_is_as_on_one_device",),
    ),
    Fault(
        name="first-of-alike-owners",
        file="mmnnx/mpmd/frontend/owners.py",
        old="return found[0] if len({self.homes[n] for n in found}) == 1 else None",
        new="return found[0] if found else None",
        what="A result whose path is that of state on several meshes is sent to the first of them.",
        tests=("tests/mpmd/jit/test_aliases.py::test_two_models_whose_paths_are_alike",),
    ),
    Fault(
        name="sum-in-narrow-floats",
        file="mmnnx/mpmd/frontend/reductions.py",
        old="return jnp.zeros_like(like, _sum_dtype(like.dtype))",
        new="return jnp.zeros_like(like)",
        what="Sums of bfloat16 gradients are kept in bfloat16 over the loop, and lose digits.",
        tests=("tests/multimesh/test_microbatch_types.py::test_reductions_of_narrow_dtypes",),
    ),
    # inline
    Fault(
        name="constraint-where-it-is-made",
        file="mmnnx/mpmd/inline/logical_constraints.py",
        old="sent = reader is not None and (a in self.makers or reader != self.readers.get(a))",
        new="sent = False",
        what="A logical constraint is dropped, or replicates, where its axes are those of a task further on.",
        tests=(
            "tests/multimesh/test_outer_constraints.py::test_an_activation_is_constrained_where_it_is_read",
            "tests/multimesh/test_outer_constraints.py::test_each_task_that_reads_it_shards_it_by_its_own_rules",
        ),
    ),
    Fault(
        name="cond-of-updates-is-one",
        file="mmnnx/mpmd/inline/calls.py",
        old=('if name == "cond" and len(meshes | self._destinations(eqn, destinations, scope)) > 1:'),
        new='if name == "cond" and len(meshes) > 1:',
        what=(
            "A cond over updates of state on several meshes is not divided: all gradients go to one mesh "
            "and back."
        ),
        tests=(
            "tests/mpmd/inline/test_conds.py::test_optimizers_that_hold_a_cond",
            "tests/mpmd/place/test_second_losses.py::test_two_steps_of_an_optimizer_that_holds_a_cond",
        ),
    ),
    Fault(
        name="cond-result-of-first-part",
        file="mmnnx/mpmd/inline/conds.py",
        old=(
            "last = [max((number[v] for v in column if v in number), default=0) for column in "
            "branches.columns]"
        ),
        new=(
            "last = [min((number[v] for v in column if v in number), default=0) for column in "
            "branches.columns]"
        ),
        what=(
            "A result of a divided cond comes from the first part that makes it in some branch, not from "
            "the last."
        ),
        tests=("tests/mpmd/place/test_tasks.py::test_a_cond_over_two_tasks",),
    ),
    Fault(
        name="component-of-two-meshes",
        file="mmnnx/mpmd/inline/distribution.py",
        old="if len(pinned) > 1:",
        new="if len(pinned) > 2:",
        what="A scan whose iterations go back and forth between two meshes is done on one of them.",
        tests=(
            "tests/mpmd/inline/test_distribution.py::test_programs_do_not_grow",
            "tests/mpmd/inline/test_distribution.py::test_parts_of_random_loops",
        ),
    ),
    Fault(
        name="reverse-scan-unrolled-forwards",
        file="mmnnx/mpmd/inline/scans.py",
        old="for i in range(scan.length)[:: scan.turn]:",
        new="for i in range(scan.length):",
        what="A reverse scan that is unrolled begins with its first iteration.",
        tests=("tests/mpmd/place/test_tasks.py::test_a_scan_over_two_tasks_is_opened",),
    ),
    # divide
    Fault(
        name="pieces-known-by-the-first",
        file="mmnnx/mpmd/divide/values.py",
        old="return self.dim, self.atoms",
        new="return self.dim, self.atoms[:1]",
        what="A slice of a value in pieces is taken for all of it, where both begin with the same piece.",
        tests=(
            "tests/mpmd/divide/test_links.py::test_a_slice_is_not_the_value_that_its_first_piece_is_of",
            "tests/mpmd/divide/test_random_functions.py::test_random_functions",
        ),
    ),
    Fault(
        name="slice-of-a-piece-without-strides",
        file="mmnnx/mpmd/divide/indexing.py",
        old="and tuple(end) == tuple(atom.aval.shape) and set(strides) <= {1}",
        new="and tuple(end) == tuple(atom.aval.shape)",
        what="A slice that goes over a whole piece in steps takes all of it.",
        tests=("tests/mpmd/divide/test_links.py::test_strides",),
    ),
    Fault(
        name="padding-at-the-wrong-end",
        file="mmnnx/mpmd/divide/recut.py",
        old="edges = (there[0] - begin, end - 1 - there[-1], between)",
        new="edges = (end - 1 - there[-1], there[0] - begin, between)",
        what="The gradient of a slice of divided state goes to other layers of a piece.",
        tests=("tests/mpmd/divide/test_links.py::test_gradients_of_slices",),
    ),
    # place
    Fault(
        name="boundary-off-by-one",
        file="mmnnx/mpmd/place/boundaries.py",
        old="flow.meshes[new[maker]] == flow.meshes[boundary + 1]",
        new="flow.meshes[new[maker]] == flow.meshes[boundary]",
        what=(
            "A value counts as there already where it is on the near side of a boundary, not on the far one."
        ),
        tests=("tests/mpmd/place/test_reused_state.py::test_activations_and_scalars_alone_cross",),
    ),
    Fault(
        name="recomputed-forward-is-backward",
        file="mmnnx/mpmd/place/classify.py",
        old=(
            'elif is_backward(n.scope) and n not in inner and (depends or "rematted_computation" not in '
            "n.scope):"
        ),
        new="elif is_backward(n.scope) and n not in inner:",
        what="What jax.checkpoint computes again of arguments alone counts as backward.",
        tests=(
            "tests/mpmd/place/test_classify.py::test_a_forward_that_is_computed_again_of_arguments_is_a_forward",
        ),
    ),
    Fault(
        name="flow-does-not-go-back",
        file="mmnnx/mpmd/place/min_cut.py",
        old="left[b][a] += flow",
        new="left[b][a] += 0",
        what="A maximum flow cannot take back what it sent another way: cuts are not the least.",
        tests=("tests/mpmd/place/test_min_cut.py::test_flow_that_goes_another_way_after_all",),
    ),
    Fault(
        name="dearer-way-is-taken",
        file="mmnnx/mpmd/place/place.py",
        old="return min(allowed, key=cost) if len(allowed) > 1 else found[0]",
        new="return found[0]",
        what="Of several placements the first is taken, though another one sends fewer bytes.",
        tests=("tests/mpmd/place/test_reused_state.py::test_activations_and_scalars_alone_cross",),
    ),
    Fault(
        name="flow-turns-back",
        file="mmnnx/mpmd/place/region.py",
        old="for p in range(max(at_least, 0), len(self.positions)):",
        new="for p in range(len(self.positions)):",
        what=("Where the flow comes to a mesh again, its work is put in the position of the first visit."),
        tests=("tests/mpmd/schedule/test_in_programs.py::test_bubble_of_several_stages_on_each_mesh",),
    ),
    # hoist
    Fault(
        name="experts-are-gathered",
        file="mmnnx/mpmd/hoist/gathers.py",
        old="used_in_parts = _used_in_parts(loop, sharded)",
        new="used_in_parts: Collection[Var] = ()",
        what=(
            "Weights of which each device uses its own part, as with experts, are gathered before the loop."
        ),
        tests=("tests/mpmd/hoist/test_reductions.py::test_weights_that_are_used_in_parts_stay_in_parts",),
    ),
    Fault(
        name="accumulator-starts-at-zero",
        file="mmnnx/mpmd/hoist/reductions.py",
        old="start = None if loop.init[n] in zeros else loop.init[n]",
        new="start = None",
        what="A sum that is reduced after the loop forgets what it was before the loop.",
        tests=("tests/mpmd/hoist/test_reductions.py::test_state_that_is_only_added_to_starts_where_it_is",),
    ),
    Fault(
        name="transpose-keeps-axes",
        file="mmnnx/mpmd/divide/links.py",
        old='return [Link((int(i),), (j,)) for j, i in enumerate(eqn.params["permutation"])]',
        new='return [Link((j,), (j,)) for j in range(len(eqn.params["permutation"]))]',
        what="A transposed value counts as sharded over the dimensions that it had before.",
        tests=("tests/mpmd/hoist/test_sharding_propagation.py::test_it_is_what_xla_does",),
    ),
    # partition
    Fault(
        name="mesh-in-axes-of-its-own",
        file="mmnnx/mpmd/partition/change_mesh.py",
        old='mesh = _in_axes_of(eqn.params["mesh"], mesh) or mesh',
        new='_in_axes_of(eqn.params["mesh"], mesh)',
        what="A shard_map over a mesh of axes of its own works in no stage but that of its devices.",
        tests=("tests/sharding/test_shard_map.py::test_over_a_mesh_in_axes_of_its_own",),
    ),
    Fault(
        name="shard-map-of-another-size",
        file="mmnnx/mpmd/partition/change_mesh.py",
        old="if here != size and f\"'{axis}'\" in text:",
        new="if here is None and f\"'{axis}'\" in text:",
        what="A shard_map over an axis that has another size on the TaskMesh is not refused.",
        tests=(
            "tests/mpmd/partition/test_change_mesh.py::test_a_shard_map_over_an_axis_of_another_size_is_refused",
        ),
    ),
    Fault(
        name="fragments-in-a-circle",
        file="mmnnx/mpmd/partition/grouping.py",
        old="free = [f for f in self._numbers.get(group, ()) if not beyond >> f & 1]",
        new="free = list(self._numbers.get(group, ()))",
        what=(
            "Equations join a fragment that reads their results by way of another mesh, so that the two "
            "wait for each other."
        ),
        tests=("tests/mpmd/place/test_reused_state.py::test_activations_and_scalars_alone_cross",),
    ),
    Fault(
        name="joins-stay-in-their-stage",
        file="mmnnx/mpmd/partition/joins.py",
        old="joins = [n for n, g in group.items() if g in base and waits[n] & ~base[g]]",
        new="joins: list[Node] = []",
        what=("What joins branches of a graph belongs to a stage, which then waits for a stage beside it."),
        tests=("tests/mpmd/partition/test_joins.py::test_an_encoder_does_not_wait_for_the_one_beside_it",),
    ),
    Fault(
        name="unplaced-optimizer-state-whole",
        file="mmnnx/mpmd/frontend/in_out_shardings.py",
        old="if own is None and leaf is not None and leaf.is_optimizer_state and shape",
        new="if own is not None and leaf is not None and leaf.is_optimizer_state and shape",
        what="Each device of a stage is given all optimizer state that was made outside, at the first call.",
        tests=(
            "tests/mpmd/frontend/test_optimizer_shardings.py::test_what_is_unplaced_from_the_first_call_on",
        ),
    ),
    Fault(
        name="larger-invariants-ahead-of-a-loop",
        file="mmnnx/mpmd/inline/loop_invariants.py",
        old="if made_of < sum(map(nbytes, e.outvars)):",
        new="if made_of < 0:",
        what="Weights of eight bits are kept as floats through a loop.",
        tests=("tests/mpmd/inline/test_loop_invariants.py::test_weights_of_eight_bits_are_kept_so",),
    ),
    Fault(
        name="larger-invariants-saved-for-a-backward",
        file="mmnnx/mpmd/partition/copies.py",
        old="return is_cheap(node) if self._in_loop else node.name in LAYOUT",
        new="return node.name in LAYOUT",
        what="A forward keeps weights of eight bits as floats for its backward.",
        tests=("tests/mpmd/inline/test_loop_invariants.py::test_weights_of_eight_bits_are_kept_so",),
    ),
    Fault(
        name="saved-activations-by-number",
        file="mmnnx/mpmd/partition/fewest_bytes.py",
        old="edges.append((number[v], number[v] + 1, nbytes(v)))",
        new="edges.append((number[v], number[v] + 1, 1))",
        what="A forward keeps the fewest values for its backward, not the fewest bytes.",
        tests=("tests/mpmd/partition/test_residuals.py::test_of_as_many_arrays_the_smaller_ones_are_kept",),
    ),
    Fault(
        name="chain-in-weight-part",
        file="mmnnx/mpmd/partition/split_backward.py",
        old="chained = any(None in found or len(found) > 1 for found in several)",
        new="chained = any(None in found for found in several)",
        what=(
            "Of a backward that is cut in two, what several gradients are made of goes to the weight part."
        ),
        tests=(
            "tests/mpmd/partition/test_split_backward.py::test_one_product_for_each_linear_layer_in_each_part",
            "tests/mpmd/partition/test_split_backward.py::test_a_custom_schedule_may_split_what_no_task_does",
        ),
    ),
    # schedule
    Fault(
        name="number-in-a-dict-of-a-module",
        file="mmnnx/mpmd/jit/arguments.py",
        old="            static_leaves.append(place)",
        new="            others.append(place)",
        what="A number in a dict of a module, which is compiled in, is changed, and the old one goes on.",
        tests=("tests/mpmd/jit/test_fast_path.py::test_plain_values_of_modules",),
    ),
    Fault(
        name="whichever-are-shared",
        file="mmnnx/mpmd/jit/arguments.py",
        old="(*self.shared, *self.same)",
        new="self.same",
        what="A call whose arguments share other Variables is taken for one like before.",
        tests=("tests/mpmd/jit/test_fast_path.py::test_which_variables_are_one",),
    ),
    Fault(
        name="one-value-given-twice",
        file="mmnnx/mpmd/jit/arguments.py",
        old="(*self.shared, *self.same)",
        new="self.shared",
        what="A call that is given two values is taken for one that was given the same value twice.",
        tests=("tests/mpmd/jit/test_fast_path.py::test_one_array_as_two_arguments",),
    ),
    Fault(
        name="parts-of-what-jax-overwrites",
        file="mmnnx/_compat.py",
        old="vars(x).pop(_PARTS, None)",
        new="pass",
        what="What a reference holds is remembered as it was before JAX wrote to it.",
        tests=("tests/test_compat.py::test_notes_on_an_array_of_what_it_was_made_of",),
    ),
    Fault(
        name="ties-by-name-alone",
        file="mmnnx/mpmd/schedule/choose.py",
        old="_Candidate(takes, True, saved, number, way, schedule)",
        new="_Candidate(takes, True, [], number, way, schedule)",
        what=("Of schedules that are equally short, not the one that holds the fewest residuals is chosen."),
        tests=("tests/mpmd/schedule/test_choose.py::test_the_shortest_in_simulation",),
    ),
    Fault(
        name="rows-of-calls-mixed",
        file="mmnnx/mpmd/partition/scan_microbatches.py",
        old="v: row[n::count] for one, row in plan.slices.items()",
        new="v: row[n * len(row) // count :] for one, row in plan.slices.items()",
        what=("Calls that several microbatches share get the slices of others."),
        tests=("tests/mpmd/test_every_schedule.py::test_several_microbatches_in_a_call",),
    ),
    Fault(
        name="carries-as-they-leave",
        file="mmnnx/mpmd/ir/scan_fragment.py",
        old="*(env[v] for v in entering)]",
        new="*(made[leaves[v]] for v in entering)]",
        what=("What reads the state of a microbatch after the call that updates it gets that of the next."),
        tests=("tests/mpmd/partition/test_scan_microbatches.py::test_a_counter_that_the_backward_reads",),
    ),
    Fault(
        name="sums-in-scans-of-microbatches",
        file="mmnnx/mpmd/compile/scan_sums.py",
        old="return f if one is f.scan.one else scan_fragment(one, f.scan.microbatches)",
        new="return f",
        what=("Where microbatches share a call, a stage keeps a second stack of its layers' gradients."),
        tests=("tests/mpmd/compile/test_scan_sums.py",),
    ),
    Fault(
        name="gradients-of-rows-in-reverse",
        file="mmnnx/mpmd/ir/scans.py",
        old='params = {name: like[name] for name in ("length", "reverse", "unroll")}',
        new='params = {name: like[name] for name in ("length", "unroll")}',
        what=("The parts of a backward scan go over its layers in the other order."),
        tests=("tests/mpmd/partition/test_split_scans.py::test_stacks_of_two_layers",),
    ),
    Fault(
        name="weights-one-early",
        file="mmnnx/mpmd/schedule/deferred_weights.py",
        old="if inputs > lag:",
        new="if inputs >= lag:",
        what=("Zero-bubble schedules run weight parts one microbatch early, where the pipeline is to fill."),
        tests=(
            "tests/mpmd/schedule/test_tables.py::test_zero_bubble_h1_written_out",
            "tests/mpmd/schedule/test_tables.py::test_zero_bubble_h2_written_out",
        ),
    ),
    Fault(
        name="carries-in-any-order",
        file="mmnnx/mpmd/schedule/dispatch_order.py",
        old="for i in (both if m else same)[n]]",
        new="for i in same[n]]",
        what="A microbatch does not wait for the state that the one before it leaves.",
        tests=(
            "tests/mpmd/schedule/test_in_programs.py::test_state_that_a_stage_carries_keeps_microbatches_in_order",
        ),
    ),
    Fault(
        name="one-forward-too-many",
        file="mmnnx/mpmd/schedule/eager_1f1b.py",
        old="return [one_each(s, 2 * after, num_microbatches)",
        new="return [one_each(s, 2 * after + 1, num_microbatches)",
        what=("Eager 1F1B runs one forward further ahead, and holds the residuals of one microbatch more."),
        tests=("tests/mpmd/schedule/test_tables.py::test_every_size",),
    ),
    Fault(
        name="turns-too-far-ahead",
        file="mmnnx/mpmd/schedule/interleaved_1f1b.py",
        old="min(hop * (num_meshes - 1 - mesh), 2 * unrolling)",
        new="hop * (num_meshes - 1 - mesh)",
        what=("With turns shorter than the pipeline, interleaved 1F1B has meshes wait for each other."),
        tests=("tests/mpmd/schedule/test_tables.py::test_turns_of_any_length",),
    ),
    Fault(
        name="ready-with-the-last-told",
        file="mmnnx/mpmd/schedule/list_scheduling.py",
        old="if end > ready[follower]:",
        new="if True:",
        what=(
            "In simulation a job starts when the job that was begun last has ended, though another one "
            "takes longer."
        ),
        tests=(
            "tests/mpmd/test_random_schedules.py::test_play",
            "tests/mpmd/schedule/test_tables.py::test_every_graph_plays",
        ),
    ),
    Fault(
        name="twice-is-not-wrong",
        file="mmnnx/mpmd/schedule/table.py",
        old="for a in expected if counts[a] > 1]",
        new="for a in expected if counts[a] > 2]",
        what="A table that runs an action twice is not refused.",
        tests=(
            "tests/mpmd/schedule/test_tables.py::test_one_action_too_few_or_too_many",
            "tests/mpmd/schedule/test_tables.py::test_what_is_wrong_with_a_table",
        ),
    ),
    # emit
    Fault(
        name="sum-of-the-last-microbatch",
        file="mmnnx/mpmd/emit/loop.py",
        old="name(out, values.latest.get((out, mesh), last), result, mesh)",
        new="name(out, last, result, mesh)",
        what=("A sum is read where the last microbatch added to it, though an earlier one came after it."),
        tests=(
            "tests/mpmd/schedule/test_in_programs.py::test_microbatches_in_another_order",
            "tests/mpmd/test_random_schedules.py::test_random_valid_tables_run_and_match",
        ),
    ),
    Fault(
        name="merged-though-sent",
        file="mmnnx/mpmd/emit/merge.py",
        old="                and sent.isdisjoint(first.outputs)\n",
        new="",
        what="Calls are merged though another mesh waits for what the first one makes.",
        tests=("tests/mpmd/emit/test_merge.py::test_what_is_sent_is_not_kept_back",),
    ),
    Fault(
        name="sent-in-every-iteration",
        file="mmnnx/mpmd/emit/steps.py",
        old="for v, mesh in plan.reads:",
        new="for v, mesh in ():",
        what="What a while reads of before it is sent in its iterations, and not there if there are none.",
        tests=("tests/mpmd/emit/test_whiles.py::test_what_does_not_change_is_sent_once",),
    ),
    Fault(
        name="carries-live-through-iterations",
        file="mmnnx/mpmd/emit/liveness.py",
        old="seen -= {*i.outputs}",
        new="pass",
        what="The old value of a carry of a while is kept beside the new one, which cannot take its place.",
        tests=("tests/mpmd/emit/test_whiles.py::test_carries_are_overwritten",),
    ),
    # ir
    Fault(
        name="shared-buffer-overwritten",
        file="mmnnx/mpmd/ir/buffers.py",
        old="    shared |= {t.inputs[0] for t in program.transfers if _common_devices(t)}\n",
        new="",
        what=("A result takes over a buffer that an array on another mesh with the same devices shares."),
        tests=("tests/mpmd/compile/test_donation.py::test_activations_of_meshes_that_share_devices",),
    ),
    Fault(
        name="cond-operands-shifted",
        file="mmnnx/mpmd/ir/dataflow.py",
        old='operands = e.invars[1:] if e.name == "cond" else e.invars',
        new="operands = e.invars",
        what=(
            "What follows state through a cond is one operand off, for the index of the branch is taken "
            "for one."
        ),
        tests=(
            "tests/mpmd/inline/test_conds.py::test_optimizers_that_hold_a_cond",
            "tests/mpmd/place/test_updates.py::test_no_gradient_is_sent",
        ),
    ),
    Fault(
        name="sum-of-rounded-terms",
        file="mmnnx/mpmd/ir/dataflow.py",
        old="return floats and (narrow == wide or jnp.finfo(narrow).bits < jnp.finfo(wide).bits)",
        new="return floats",
        what=(
            "A sum of floats that is rounded to a narrower type is taken apart, and its terms rounded "
            "one by one."
        ),
        tests=("tests/mpmd/ir/test_dataflow.py::test_a_sum_that_is_rounded_is_one_term",),
    ),
    Fault(
        name="spec-that-does-not-divide",
        file="mmnnx/mpmd/ir/shardings.py",
        old="return axes if axes and size % parts == 0 else None",
        new="return axes or None",
        what="An argument is to enter another mesh sharded over an axis that does not divide it.",
        tests=("tests/mpmd/runtime/test_state.py::test_state_of_a_new_shape_stays_at_home",),
    ),
    Fault(
        name="simulated-free-too-early",
        file="mmnnx/mpmd/ir/simulate.py",
        old="changes += [((end, int(end == start), n, 1), -1, s) for s in dropped]",
        new="changes += [((start, 0, n, 1), -1, s) for s in dropped]",
        what=("In simulation a call drops its inputs when it starts, so that peaks of memory are too low."),
        tests=("tests/mpmd/ir/test_simulate.py::test_bytes_are_those_of_the_arrays",),
    ),
    Fault(
        name="bubble-of-the-whole-step",
        file="mmnnx/mpmd/ir/timeline.py",
        old="return 1 - busy / (self.period * len(devices)) if self.period else 0.0",
        new="return 1 - busy / (self.makespan * len(devices)) if self.period else 0.0",
        what="The bubble is that of one step alone, also where steps overlap.",
        tests=(
            "tests/mpmd/schedule/test_tables.py::test_bubble_and_period",
            "tests/mpmd/schedule/test_tables.py::test_every_size",
        ),
    ),
    Fault(
        name="loops-may-run-twice",
        file="mmnnx/mpmd/ir/verify.py",
        old="(times := counts[f, m]) != 1",
        new="(times := counts[f, m]) == 0",
        what="Program.verify accepts a fragment that runs twice for a microbatch.",
        tests=("tests/mpmd/ir/test_verify.py::test_made_twice",),
    ),
    # compile
    Fault(
        name="loaded-without-code",
        file="mmnnx/mpmd/compile/executables.py",
        old="if _compat.cache_hits() == hits else None",
        new="if hits is not None else None",
        what="What JAX took out of its cache, with no machine code, is loaded for other devices.",
        tests=("tests/mpmd/compile/test_executables.py::test_a_cache_without_own_entries",),
    ),
    Fault(
        name="gathered-to-be-sent",
        file="mmnnx/mpmd/compile/buffer_shardings.py",
        old="if not same_shape(t.source_mesh, t.target_mesh) and placed not in fixed:",
        new="if placed not in fixed:",
        what="All that goes to another mesh is replicated first, also where it could stay sharded.",
        tests=("tests/mpmd/hoist/test_reductions.py::test_nothing_is_reduced_or_gathered_in_the_loop",),
    ),
    Fault(
        name="callback-asked-once",
        file="mmnnx/mpmd/compile/constant_keys.py",
        old='impure = e.effects or "callback" in e.primitive.name',
        new="impure = e.effects",
        what="A callback that says of which key things are drawn is asked once for all calls.",
        tests=(
            "tests/mpmd/compile/test_constant_keys.py::test_a_seed_that_the_host_is_asked_for_is_asked_for_in_every_call",
        ),
    ),
    Fault(
        name="kept-arguments-overwritten",
        file="mmnnx/mpmd/compile/donation.py",
        old=" | (program.inputs.keys() - donated)",
        new="",
        what=(
            "A result takes over the buffer of a donated argument that is needed elsewhere, such as one "
            "that is returned."
        ),
        tests=("tests/mpmd/runtime/test_state.py::test_tasks_that_share_devices",),
    ),
    Fault(
        name="checkpoint-merged-with-its-forward",
        file="mmnnx/mpmd/inline/common_subexpressions.py",
        old="elif not is_backward(node.scope):",
        new="else:",
        what="What a checkpoint over several tasks is to compute again is kept from the forward.",
        tests=(
            "tests/mpmd/inline/test_common_subexpressions.py"
            "::test_a_checkpoint_over_two_tasks_is_computed_again",
        ),
    ),
    Fault(
        name="zeros-without-sign",
        file="mmnnx/mpmd/ir/equality.py",
        old="return (type(x), repr(x) if isinstance(x, (float, complex)) else x)",
        new="return (type(x), x)",
        what="Stages that differ in 0.0 and -0.0 alone are compiled as one.",
        tests=("tests/mpmd/ir/test_equality.py::test_different",),
    ),
    Fault(
        name="arguments-at-the-last-reader",
        file="mmnnx/mpmd/compile/input_shardings.py",
        old="homes[v] = min(homes.get(v, mesh), mesh,",
        new="homes[v] = max(homes.get(v, mesh), mesh,",
        what="An argument that several meshes read is said to live best on the last of them.",
        tests=(
            "tests/mpmd/compile/test_input_shardings.py::test_shared_state_has_its_home_where_the_flow_meets_it_first",
        ),
    ),
    Fault(
        name="equal-but-for-donation",
        file="mmnnx/mpmd/compile/lower.py",
        old="return jaxpr_key(f.jaxpr), specs, tuple(donations), _mesh_key(f.mesh)",
        new="return jaxpr_key(f.jaxpr), specs, _mesh_key(f.mesh)",
        what=("A fragment that keeps its inputs is given the program of one that is alike and donates them."),
        tests=(
            "tests/mpmd/test_parity.py::test_counters_and_keys_need_no_rule_of_their_own",
            "tests/mpmd/test_every_schedule.py::test_state_that_changes_with_every_microbatch",
        ),
    ),
    Fault(
        name="equal-but-for-types",
        file="mmnnx/mpmd/compile/lower.py",
        old=(
            "key = (digest, inputs, outputs, specs, avals, _mesh_key(f.mesh)) if is_shareable else object()"
        ),
        new=("key = (digest, inputs, outputs, specs, _mesh_key(f.mesh)) if is_shareable else object()"),
        what=(
            "A fragment is given the program of one whose values have other weak types, or are words "
            "instead of keys."
        ),
        tests=("tests/multimesh/test_microbatch_tasks.py::test_random_numbers_from_a_key",),
    ),
    Fault(
        name="callbacks-asked-again",
        file="mmnnx/mpmd/compile/outline.py",
        old="if not f.jaxpr.effects and not _calls_host(f.jaxpr):",
        new="if not f.jaxpr.effects:",
        what="A fragment that calls the host is divided, and each part asks again.",
        tests=("tests/mpmd/compile/test_outline.py::test_what_calls_the_host_is_left_whole",),
    ),
    # runtime
    Fault(
        name="buffers-are-never-dropped",
        file="mmnnx/mpmd/runtime/dispatch.py",
        old="tuple(place[s] for s in step.frees if s in place)",
        new="()",
        what="Every array of a call is kept to its end.",
        tests=(
            "tests/mpmd/runtime/test_dispatch.py::test_arrays_are_dropped_when_nothing_reads_them_any_more",
        ),
    ),
    Fault(
        name="bytes-of-one-device",
        file="mmnnx/mpmd/runtime/live_bytes.py",
        old="math.prod(shard) * array.dtype.itemsize * array.sharding.num_devices",
        new="math.prod(shard) * array.dtype.itemsize",
        what="Measured peaks of memory are those of one device of each mesh.",
        tests=("tests/mpmd/runtime/test_profile.py::test_bytes_of_replicas_count_on_every_device",),
    ),
    Fault(
        name="two-results-one-buffer",
        file="mmnnx/mpmd/runtime/results.py",
        old="delivery = _copied(delivery) if foreign or (is_var(v) and v in used) else delivery",
        new="delivery = _copied(delivery) if foreign else delivery",
        what=(
            "One value that is returned twice is one array, so that to donate one result takes the other "
            "along."
        ),
        tests=("tests/mpmd/jit/test_aliases.py::test_what_is_returned_is_the_callers_own",),
    ),
    Fault(
        name="copied-in-another-layout",
        file="mmnnx/mpmd/runtime/transfers.py",
        old=(
            "    if not source.is_equivalent_to(transferred(target, mesh_of(source)), "
            "len(aval.shape)):\n        return False\n"
        ),
        new="",
        what="An array that is to have another layout on the next mesh is copied shard by shard.",
        tests=("tests/mpmd/runtime/test_transfers.py::test_any_layout_to_any_other",),
    ),
    # jit
    Fault(
        name="program-for-another-home",
        file="mmnnx/mpmd/jit/cache_key.py",
        old="return (aval, x.sharding) if placed else aval",
        new="return aval",
        what=(
            "Arguments that live elsewhere than those of an earlier call are given to the program of "
            "that call."
        ),
        tests=(
            "tests/mpmd/jit/test_fast_path.py::test_another_home_does_not_take_a_stale_one",
            "tests/mpmd/jit/test_fast_path.py::test_another_sharding_of_an_argument",
        ),
    ),
    Fault(
        name="repeats-what-was-not-fused",
        file="mmnnx/mpmd/jit/cache_key.py",
        old="contexts = ignoring.get(), recomputing.get(), fusing.get(), autosharding.get()",
        new="contexts = ignoring.get(), recomputing.get(), autosharding.get()",
        what="A call inside of mm.enable_task_fusion repeats one that was made outside.",
        tests=("tests/mpmd/partition/test_task_fusion.py::test_tasks_stay_apart_unless_they_are_fused",),
    ),
    # distributed
    Fault(
        name="agreement-on-the-name",
        file="mmnnx/mpmd/distributed/agreement.py",
        old="hashlib.sha256(program.encode()).digest()",
        new="hashlib.sha256(name.encode()).digest()",
        what="Processes that have built different programs of one function are not told so.",
        tests=("tests/processes/test_train.py::test_processes_that_build_different_programs_say_where",),
    ),
    Fault(
        name="fetched-twice",
        file="mmnnx/mpmd/distributed/fetch.py",
        old="received[device.process_index] = raw[size:]",
        new="received[device.process_index] = raw",
        what="mm.fetch takes the first array of another process for every further one.",
        tests=("tests/processes/test_fetch.py::test_values_come_to_all_and_the_store_forgets_them",),
    ),
    Fault(
        name="one-process-too-many",
        file="mmnnx/mpmd/distributed/initialize.py",
        old="not 0 <= number < count",
        new="not 0 <= number <= count",
        what="mm.initialize accepts a process_id that is the number of processes.",
        tests=("tests/processes/test_start.py::test_a_process_is_one_of_those_that_there_are",),
    ),
    Fault(
        name="values-got-at-once",
        file="mmnnx/mpmd/distributed/key_value.py",
        old='if "DEADLINE_EXCEEDED" not in str(error):',
        new='if "DEADLINE_EXCEEDED" in str(error):',
        what="What another process says more than two seconds late is not waited for.",
        tests=(
            "tests/processes/test_faults.py::test_a_process_that_has_another_batch_builds_a_program_alone",
        ),
    ),
    Fault(
        name="fewer-processes-are-welcome",
        file="mmnnx/mpmd/distributed/rendezvous.py",
        old="if its_count != count:",
        new="if its_count > count:",
        what="A process that was started as one of fewer is not refused.",
        tests=("tests/processes/test_start.py::test_processes_of_different_counts_do_not_start",),
    ),
    Fault(
        name="array-of-another-call",
        file="mmnnx/mpmd/distributed/transport.py",
        old=("return hash((process, count, progress.current.step, progress.current.call)) & (2**63 - 1)"),
        new="return hash((process, count, progress.current.step)) & (2**63 - 1)",
        what="An array that a process sends in another call is taken for that of this one.",
        tests=(
            "tests/processes/test_transport.py::test_arrays_of_another_program_call_or_step_have_another_ticket",
        ),
    ),
    Fault(
        name="end-of-a-sender-unseen",
        file="mmnnx/mpmd/distributed/transport.py",
        old="waits.Wait(process, what, _received[process], arrays[-1])",
        new="waits.Wait(process, what, 0, arrays[-1])",
        what=(
            "That a process has ended without sending what another waits for is not seen before the timeout."
        ),
        tests=(
            "tests/processes/test_faults.py::test_a_process_that_ends_before_the_others_is_told_from_one_that_died",
        ),
    ),
    Fault(
        name="timeout-in-milliseconds",
        file="mmnnx/mpmd/distributed/watchdog.py",
        old="elif wait.timed and min(wait.beats, self._quiet()) * BEAT > self.timeout:",
        new="elif wait.timed and min(wait.beats, self._quiet()) * BEAT > self.timeout * 1000:",
        what="A process that waits for an array for ever is not ended after the timeout.",
        tests=("tests/processes/test_faults.py::test_a_transfer_that_is_cut_names_its_ends",),
    ),
    # other packages
    Fault(
        name="window-one-wider",
        file="mmnnx/modules/masks.py",
        old="seen & (distance < window)",
        new="seen & (distance <= window)",
        what="With a cache, attention sees one token more than its window.",
        tests=("tests/modules/test_attention.py::test_decoding_equals_the_full_forward",),
    ),
    Fault(
        name="runs-not-even",
        file="mmnnx/sharding/pipeline.py",
        old="totals[i][j - i - 1] ** 2",
        new="totals[i][j - i - 1]",
        what=("Of the ways to cut a stack whose largest stage is smallest, not the most even one is taken."),
        tests=(
            "tests/sharding/test_pipeline.py::TestBalance::test_is_best_of_all_splits",
            "tests/sharding/test_pipeline.py::TestBalance::test_does_not_need_to_come_out_even_and_gives_early_stages_less",
        ),
    ),
    Fault(
        name="layers-in-alphabetical-order",
        file="mmnnx/sharding/layers.py",
        old="sorted((tuple(map(int, match.groups())), key) for match, key in matches if match)",
        new="sorted(((), key) for match, key in matches if match)",
        what="Layers that are attributes with numbers are sorted as text: layer_10 comes before layer_2.",
        tests=(
            "tests/sharding/test_layers.py::TestNumberedAttributes::test_they_are_layers_in_the_order_of_their_numbers",
        ),
    ),
    Fault(
        name="any-end-of-a-path",
        file="mmnnx/sharding/placement.py",
        old="        ends = ends if known is None else [known]\n",
        new="",
        what=(
            "A slot of an optimizer is placed by a rule that any end of its path matches, whatever its "
            "parameter is."
        ),
        tests=("tests/mpmd/frontend/test_optimizer_state.py::test_a_rule_of_their_own",),
    ),
    Fault(
        name="shortest-prefix-is-renamed",
        file="mmnnx/train/checkpoint/rename.py",
        old="old = max(matching, key=lambda old: len(_keys(old)))",
        new="old = min(matching, key=lambda old: len(_keys(old)))",
        what="Of several prefixes that rename= has for a name the shortest counts.",
        tests=("tests/train/checkpoint/test_structure.py::test_rename",),
    ),
    Fault(
        name="damage-goes-unseen",
        file="mmnnx/train/checkpoint/step_folders.py",
        old="if checksum(value) != sums[name]:",
        new="if value is None:",
        what="A checkpoint whose JSON was changed is read as if it were whole.",
        tests=(
            "tests/train/checkpoint/test_damage.py::test_every_file_damaged_in_every_way",
            "tests/train/checkpoint/test_damage.py::test_unreadable_metrics_delete_nothing",
        ),
    ),
    Fault(
        name="first-batch-is-dropped",
        file="multimesh_compat/jax/parallel.py",
        old="made.pop() if made else get_input_batch()",
        new="get_input_batch()",
        what="The batch that parallelize took for its shapes is never handed out.",
        tests=("tests/multimesh/test_parallelize.py::TestArguments::test_batches_are_made_anew",),
    ),
    Fault(
        name="sums-in-the-order-of-the-lines",
        file="mmnnx/mpmd/place/sums_by_mesh.py",
        old="if self._sent_to(found, end) >= self._sent_now(found):",
        new="if found:",
        what="Gradients of a value that one mesh makes are sent one by one, and not their sum.",
        tests=("tests/mpmd/place/test_sums_by_mesh.py::test_a_residual_block_and_an_auxiliary_loss",),
    ),
    Fault(
        name="sums-where-terms-are-made",
        file="mmnnx/mpmd/place/gradient_sums.py",
        old="_with_accumulators(node, kept.get)",
        new="_with_accumulators(node, body.mesh_of)",
        what="What is added to state elsewhere is summed where it is made, also into the state itself.",
        tests=("tests/mpmd/place/test_sums_of_state.py::test_it_is_what_it_is_whole",),
    ),
    Fault(
        name="stack-is-there-by-itself",
        file="mmnnx/mpmd/place/backward.py",
        old="if u not in region.loose)",
        new="if u is not maker)",
        what="What only the backward reads counts as a place where its operands are.",
        tests=("tests/mpmd/place/test_coming_again.py::test_an_output_that_is_fed_back",),
    ),
    Fault(
        name="linear-solve-is-whole",
        file="mmnnx/mpmd/inline/calls.py",
        old='if name == "custom_linear_solve" and in_loop is InLoop.NO:',
        new='if name == "custom_linear_solve" and in_loop is None:',
        what="A linear solve over several tasks is done on one of them.",
        tests=("tests/mpmd/inline/test_while.py::test_conjugate_gradients",),
    ),
    Fault(
        name="carries-in-the-order-of-a-set",
        file="mmnnx/mpmd/ir/scan_fragment.py",
        old="[v for v, after in leaves.items() if v in microbatches.passed and after in one.outvars]",
        new="[v for v in microbatches.passed if leaves[v] in one.outvars]",
        what="Two processes that trace one function make programs of other orders, and refuse to run.",
        tests=("tests/mpmd/test_same_program.py::test_whatever_variables_hash_to",),
    ),
    Fault(
        name="places-in-the-order-of-a-set",
        file="mmnnx/mpmd/place/backward.py",
        old="ordered = _in_order(choices)",
        new="ordered = [*choices]",
        what="Two processes place a backward that reads state of two meshes on other ones.",
        tests=("tests/mpmd/test_same_program.py::test_whatever_strings_hash_to",),
    ),
    Fault(
        name="sums-of-microbatches-hold-no-weights",
        file="mmnnx/mpmd/inline/common_subexpressions.py",
        old="self.weighted.update(v for v, inner in made if is_var(inner) and inner in inside.weighted)",
        new="self.weighted.update(v for v, inner in made if False)",
        what="A norm that clips and that is logged is made, and sent, twice.",
        tests=("tests/mpmd/inline/test_common_subexpressions.py::test_a_norm_that_clips_and_is_a_metric",),
    ),
    Fault(
        name="all-that-is-added-to-state-is-new-state",
        file="mmnnx/mpmd/place/place.py",
        old="if first.sent and first.roles.after_inner:",
        new="if first is None:",
        what="After an inner gradient, weights are sent to an activation that is as large as a bias.",
        tests=(
            "tests/mpmd/place/test_inner_gradients.py::test_an_activation_as_large_as_state_is_no_new_value_of_it",
        ),
    ),
    Fault(
        name="shared-gradients-go-home-each-time",
        file="mmnnx/mpmd/inline/shared_backward.py",
        old="once < self.loop.spec.length",
        new="once < 0",
        what="The gradient of a bias that all stages use is sent home in every microbatch.",
        tests=("tests/mpmd/inline/test_shared_backward.py::test_a_bias_by_relative_positions",),
    ),
    Fault(
        name="two-meshes-share-what-they-make",
        file="mmnnx/mpmd/inline/common_subexpressions.py",
        old="and here.isdisjoint(there)",
        new="and here is there",
        what="Layers of two meshes that repeat the same keys have them sent repeated.",
        tests=(
            "tests/mpmd/inline/test_common_subexpressions.py::test_layers_of_two_meshes_do_the_same_to_a_value",
        ),
    ),
    Fault(
        name="positions-are-added-before-they-are-sent",
        file="mmnnx/mpmd/place/place.py",
        old="if moving := _combined_again(first):",
        new="if moving := frozenset():",
        what="What a layer adds to what it reads is added on the mesh before it, and both are sent.",
        tests=("tests/mpmd/place/test_reused_state.py::test_what_each_layer_begins_with_goes_to_the_layers",),
    ),
    Fault(
        name="optax-state-is-no-optimizer-state",
        file="mmnnx/mpmd/frontend/graph.py",
        old="return isinstance(x, tuple) and type(x)",
        new="return x is None and type(x)",
        what="Rows of Adafactor that no nnx.Optimizer holds are on the first mesh.",
        tests=("tests/mpmd/frontend/test_optimizer_shardings.py::test_state_of_optax_itself",),
    ),
    Fault(
        name="a-second-pass-is-an-update",
        file="mmnnx/mpmd/place/place.py",
        old="if loop is not None or (second := second_pass(found[0])) is None:",
        new="if found or (second := second_pass(found[0])) is None:",
        what="Of a second epoch in a step, activations go back to the first stage after each layer.",
        tests=("tests/mpmd/place/test_second_losses.py::test_a_second_pass_flows_as_the_first_does",),
    ),
    Fault(
        name="labels-count-as-the-masks-made-of-them",
        file="mmnnx/mpmd/place/candidates.py",
        old="sent.get(a, [a])",
        new="sent.get(None, [a])",
        what="With the batch on the first stage another way to place is taken, which sends more.",
        tests=("tests/mpmd/place/test_batches.py::test_what_is_made_of_labels_counts_as_the_labels",),
    ),
    Fault(
        name="what-holds-a-jaxpr-is-a-call",
        file="mmnnx/mpmd/inline/calls.py",
        old="if name in _CALLED:",
        new="if len(bodies) == 1:",
        what="A scatter or a reduction over state of two meshes computes how two entries are combined.",
        tests=("tests/mpmd/inline/test_calls.py::test_a_jaxpr_that_combines_entries_is_no_call",),
    ),
    Fault(
        name="a-barrier-gathers-all-on-one-mesh",
        file="mmnnx/mpmd/inline/calls.py",
        old='if name in ("device_put", "optimization_barrier"):',
        new='if name == "device_put":',
        what="A barrier over all parameters puts the whole pipeline on one mesh.",
        tests=("tests/mpmd/inline/test_calls.py::test_a_barrier_for_several_arrays_leaves_each_where_it_is",),
    ),
    Fault(
        name="an-inner-jit-runs-while-the-outer-is-traced",
        file="mmnnx/mpmd/jit/inner_jit.py",
        old="if _compat.under_jit() or any(",
        new="if any(",
        what="An mm.jit inside of another, whose arguments are not traced, runs once, at trace time.",
        tests=("tests/mpmd/jit/test_nested.py::test_callbacks_happen_with_each_call_of_what_is_around_it",),
    ),
    Fault(
        name="gradients-behind-an-encoder-go-to-the-encoder",
        file="mmnnx/mpmd/place/backward.py",
        old="if region.in_loop and incoming and all(_is_sent_before",
        new="if not region.in_loop and incoming and all(_is_sent_before",
        what="Gradients of a stage's weights for a shared prefix are made where the prefix is.",
        tests=(
            "tests/mpmd/inline/test_shared_backward.py::test_what_a_layer_makes_of_it_by_weights_of_its_own",
        ),
    ),
    Fault(
        name="state-on-single-devices-is-unplaced",
        file="mmnnx/mpmd/frontend/in_out_shardings.py",
        old="return elsewhere if len({*meshes, *elsewhere.values()}) > 1 else {}",
        new="return {}",
        what="State that jax.device_put has put on two devices is moved to the first one.",
        tests=("tests/mpmd/jit/test_homes.py::test_state_that_device_put_has_put_on_devices_stays_there",),
    ),
)
