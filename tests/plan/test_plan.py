"""The plan without the TPU compiler: parsing programs, models of network and memory, the text."""

import json
import re
import types

import jax
import numpy as np
import pytest
from conftest import TINY, last_error
from jax.sharding import Mesh

from vit_jax import config as configs
from vit_jax.cli import spool
from vit_jax.distributed import hardware
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import NegativeResult, UserError
from vit_jax.plan import __main__ as command
from vit_jax.plan import (
    collectives,
    compilation,
    cost_model,
    figures,
    hlo,
    report,
    run,
    search,
    suggestions,
    topology,
)
from vit_jax.train import loop
from vit_jax.train.experiment import Experiment

V5E = hardware.TPUS["v5e"]
KEYS = {"config", "topology", "num_slices", "num_chips", "mesh", "fits", "hbm_limit_gib", "hbm_gib"}
KEYS |= {"params", "model_flops_per_image", "collectives", "step_ms", "mfu", "days", "chip_hours"}
KEYS |= {"images_per_sec_per_chip", "host_cores", "sharding_constraints", "compile_s"}
KEYS |= {"suggestions", "compile_cached"}


class Device(types.SimpleNamespace):
    """A described chip."""

    __hash__ = object.__hash__


def pod(*extents: int, slices: int = 1, kind: str = "TPU v5 lite") -> list[Device]:
    x, y, z = (*extents, 1, 1)[:3]
    spots = [(a, b, c) for c in range(z) for b in range(y) for a in range(x)]
    common = dict(core_on_chip=0, process_index=0, platform="tpu", device_kind=kind)
    return [
        Device(id=i * len(spots) + n, coords=spot, slice_index=i, **common)
        for i in range(slices)
        for n, spot in enumerate(spots)
    ]


def mesh_of(devices, *shape: int) -> Mesh:
    return Mesh(np.array(devices, dtype=object).reshape(shape), meshes.AXES)


PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=4

%inner (p.0: bf16[8,16]) -> bf16[8,16] {
  %p.0 = bf16[8,16]@ parameter(0)
  ROOT %tanh.1 = bf16[8,16]@ tanh(%p.0), metadata={op_name="jit(f)/tanh"}
}

%matmul (a: bf16[8,16], w: bf16[4,16,32], i: s32[]) -> bf16[8,32] {
  %a = bf16[8,16]@ parameter(0)
  %w = bf16[4,16,32]# parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %act = bf16[8,16]@ fusion(%a), kind=kLoop, calls=%inner
  %slice.1 = bf16[1,16,32]# dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,16,32}
  %weights = bf16[16,32]@ bitcast(%slice.1)
  ROOT %out = bf16[8,32]@ convolution(%act, %weights), dim_labels=bf_io->bf
}

%put (stack: bf16[4,8,32], y: bf16[8,32], n: s32[]) -> (bf16[4,8,32], f32[8]) {
  %stack = bf16[4,8,32]# parameter(0)
  %y = bf16[8,32]@ parameter(1)
  %n = s32[]{:T(128)} parameter(2)
  %zero.1 = s32[]{:T(128)} constant(0)
  %row = bf16[1,8,32]# bitcast(%y)
  %put.1 = bf16[4,8,32]# dynamic-update-slice(%stack, %row, %n, %zero.1, /*index=4*/%zero.1)
  %sum = f32[8]{0:T(128)} reduce(%y, %zero.1), dimensions={1}, to_apply=%add
  ROOT %tuple.1 = (bf16[4,8,32]#, f32[8]{0:T(128)}) tuple(%put.1, %sum)
}

%add (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[]{:T(128)} parameter(0)
  %y.1 = f32[]{:T(128)} parameter(1)
  ROOT %add.1 = f32[]{:T(128)} add(%x.1, %y.1)
}

%less (c: s32[], limit: s32[]) -> pred[] {
  %c = s32[]{:T(128)} parameter(0)
  %limit = s32[]{:T(128)} parameter(1)
  ROOT %lt = pred[]{:T(512)} compare(%c, %limit), direction=LT
}

%condition (t.1: (s32[], bf16[8,16])) -> pred[] {
  %t.1 = (s32[]{:T(128)}, bf16[8,16]@) parameter(0)
  %n.1 = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  %four = s32[]{:T(128)} constant(4)
  ROOT %compare = pred[]{:T(512)} fusion(%n.1, %four), kind=kLoop, calls=%less
}

%body (t: (s32[], bf16[8,16], bf16[4,16,32], bf16[4,8,32])) -> (s32[], bf16[8,16], bf16[4,16,32], bf16[4,8,32]) {
  %t = (s32[]{:T(128)}, bf16[8,16]@, /*index=2*/bf16[4,16,32]{2,1,0}, bf16[4,8,32]{2,1,0}) parameter(0)
  %n.2 = s32[]{:T(128)} get-tuple-element(%t), index=0
  %x = bf16[8,16]@ get-tuple-element(%t), index=1
  %ws = bf16[4,16,32]# get-tuple-element(%t), index=2
  %saved = bf16[4,8,32]# get-tuple-element(%t), index=3
  %product = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} fusion(%x, %ws, %n.2), kind=kOutput, calls=%matmul, \
backend_config={"window":[],"estimated_cycles":"100"}
  %kept = (bf16[4,8,32]{2,1,0}, f32[8]{0:T(128)}) fusion(%saved, %product, %n.2), kind=kLoop, calls=%put, \
backend_config={"estimated_cycles":"30"}
  ROOT %next = (s32[]{:T(128)}, bf16[8,16]@, bf16[4,16,32]{2,1,0}, bf16[4,8,32]{2,1,0}) tuple(%n.2, %x, %ws, %saved)
}

%yes (p.1: f32[16]) -> f32[16] {
  %p.1 = f32[16]{0:T(128)} parameter(0)
  ROOT %square = f32[16]{0:T(128)} multiply(%p.1, %p.1), backend_config={"estimated_cycles":"7"}
}

%no (p.2: f32[16]) -> f32[16] {
  %p.2 = f32[16]{0:T(128)} parameter(0)
  ROOT %same = f32[16]{0:T(128)S(1)} copy(%p.2)
}

ENTRY %main (x.2: bf16[8,16], w.2: bf16[4,16,32]) -> f32[16] {
  %x.2 = bf16[8,16]@ parameter(0)
  %w.2 = bf16[4,16,32]# parameter(1)
  %start = (s32[]{:T(128)}, bf16[8,16]@) tuple(%x.2, %w.2)
  %loop = (s32[]{:T(128)}, bf16[8,16]@) while(%start), condition=%condition, body=%body
  %again = (s32[], bf16[8,16]) while(%loop), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %part = bf16[1,16,32]# slice(%w.2), slice={[0:1], [0:16], [0:32]}
  %flag = pred[]{:T(512)} constant(true)
  %ones = f32[16]{0:T(128)} constant({...})
  ROOT %either = f32[16]{0:T(128)} conditional(%flag, %ones, %ones), true_computation=%yes, false_computation=%no
}
"""
PROGRAM = PROGRAM.replace("@", "{1,0:T(8,128)(2,1)}").replace("#", "{2,1,0:T(8,128)(2,1)}")


@pytest.fixture(scope="module")
def program():
    return hlo.Program(PROGRAM)


def test_instructions_run_as_often_as_the_loops_around_them(program):
    times = {}
    for _, instruction, count in program.walk():
        times[instruction.name] = times.get(instruction.name, 0) + count
    assert program.entry == "main"
    # 4 by the constant of the condition and 3 by the known count; of a conditional both branches.
    assert times["product"] == times["kept"] == 7
    assert times["square"] == times["same"] == times["part"] == 1
    assert not {"loop", "again", "either", "act", "out"} & set(times)


def test_flops_bytes_and_cycles_equal_those_counted_by_hand(program):
    found = {
        i.name: (program.flops(name, i), program.hbm_bytes(name, i), i.cycles)
        for name, i, _ in program.walk()
    }
    sliced, index = 16 * 32 * 2, 4
    # The result is in the chip's own memory, S(1): only operands count, and of the weights one of
    # four slices.
    assert found["product"] == (2 * 8 * 16 * 32, 8 * 16 * 2 + sliced + index, 100)
    # Reads nothing of S(1) and of the stack; writes one of its rows, and the whole sum.
    assert found["kept"] == (0, index + 8 * 32 * 2 + 8 * 4, 30)
    assert found["square"] == (0, 3 * 64, 7)
    assert found["same"] == (0, 64, 0)
    assert found["part"] == (0, 2 * sliced, 0)
    assert all(found[name] == (0, 0, 0) for name in ("n.2", "x", "next", "start", "flag"))


def test_time_is_the_sum_over_instructions_of_the_nearer_limit(program):
    roofline, cycles = figures.compute_ms(program, V5E)
    moved = 7 * (1284 + 548) + 192 + 64 + 2048  # all of them bound by memory
    assert roofline == pytest.approx(1e3 * moved / V5E.hbm_bandwidth)
    assert cycles == pytest.approx(1e3 * (7 * 130 + 7) / V5E.clock)


@pytest.mark.parametrize(
    ("printed", "in_all", "in_hbm"),
    [
        ("bf16[8,16]{1,0:T(8,128)(2,1)}", 256, 256),
        ("(f32[2,3]{1,0:T(8,128)S(1)}, /*index=1*/s32[]{:S(4)}, u8[5]{0})", 33, 5),
        ("(token[], pred[7], s4[4]{0:T(128)E(4)})", 9, 9),
    ],
)
def test_bytes_of_a_printed_shape(printed, in_all, in_hbm):
    assert (hlo.nbytes(printed), hlo.nbytes(printed, in_hbm=True)) == (in_all, in_hbm)


# Sides of input and kernel; stride, padding, dilations; groups of features and of the batch.
CONVOLUTIONS = [
    dict(size=(6, 5), kernel=(3, 3)),
    dict(size=(8, 8), kernel=(4, 4), stride=(4, 4)),
    dict(size=(7, 5), kernel=(3, 2), stride=(2, 1), pad=((1, 2), (0, 1))),
    dict(size=(6, 6), kernel=(3, 3), pad=((3, 2), (2, 3)), lhs=(2, 1)),
    dict(size=(9, 7), kernel=(3, 2), pad=((2, 2), (1, 0)), rhs=(2, 3)),
    dict(size=(8, 6), kernel=(3, 3), pad=((-1, 0), (1, -1)), lhs=(1, 3), rhs=(2, 1)),
    # A product of batches of matrices, as the TPU compiler writes it.
    dict(size=(4, 3), kernel=(4, 3), stride=(3, 2), lhs=(4, 3)),
    dict(size=(5, 4), kernel=(3, 2), stride=(4, 3), pad=((5, 2), (-1, 2)), lhs=(6, 2)),
    dict(size=(5, 5), kernel=(3, 3), groups=2),
    dict(size=(5, 5), kernel=(3, 3), pad=((1, 1), (1, 1)), batch_groups=2),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_flops_of_a_convolution_are_those_that_meet_a_real_element(case):
    batch, channels, features = 4, 6, 8
    stride, lhs, rhs = (case.get(key, (1, 1)) for key in ("stride", "lhs", "rhs"))
    pad, groups = case.get("pad", ((0, 0), (0, 0))), case.get("groups", 1)
    x = np.ones((batch, *case["size"], channels))
    w = np.ones((*case["kernel"], channels // groups, features))
    # Convolved ones count the products.
    out = jax.lax.conv_general_dilated(
        x, w, stride, pad, lhs, rhs, ("NHWC", "HWIO", "NHWC"), groups, case.get("batch_groups", 1)
    )
    fields = dict(size=case["kernel"], stride=stride, lhs_dilate=lhs, rhs_dilate=rhs)
    fields["pad"] = [f"{low}_{high}" for low, high in pad]
    window = " ".join(f"{key}={'x'.join(map(str, value))}" for key, value in fields.items())
    sizes = [",".join(map(str, array.shape)) for array in (x, w, out)]
    text = f"""HloModule m

ENTRY %main (x: f32[{sizes[0]}], w: f32[{sizes[1]}]) -> f32[{sizes[2]}] {{
  %x = f32[{sizes[0]}]{{3,2,1,0}} parameter(0)
  %w = f32[{sizes[1]}]{{3,2,1,0}} parameter(1)
  ROOT %y = f32[{sizes[2]}]{{3,2,1,0}} convolution(%x, %w), window={{{window}}}, \
dim_labels=b01f_01io->b01f, feature_group_count={groups}, \
batch_group_count={case.get("batch_groups", 1)}
}}
"""
    assert hlo.Program(text).flops_of("main") == pytest.approx(2 * float(out.sum()))


def test_flops_of_a_dot():
    text = """HloModule m

ENTRY %main (x: f32[3,5,7], w: f32[3,7,2]) -> f32[3,5,2] {
  %x = f32[3,5,7]{2,1,0} parameter(0)
  %w = f32[3,7,2]{2,1,0} parameter(1)
  ROOT %y = f32[3,5,2]{2,1,0} dot(%x, %w), lhs_batch_dims={0}, lhs_contracting_dims={2}, \
rhs_batch_dims={0}, rhs_contracting_dims={1}
}
"""
    assert hlo.Program(text).flops_of("main") == 2 * 3 * 5 * 2 * 7


EIGHT = np.arange(8).reshape(2, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}, to_apply=%add", [[0, 1], [2, 3]]),
        ("source_target_pairs={{0,3},{3,0}}", [[0, 3], [3, 0]]),
        ("replica_groups=[2,4]<=[8], dimensions={0}", EIGHT),
        ("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", np.arange(4).reshape(2, 2).T),
        (
            "replica_groups=[4,2]<=[2,2,2]T(2,0,1)",
            np.arange(8).reshape(2, 2, 2).transpose(2, 0, 1).reshape(4, 2),
        ),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={1}", EIGHT),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={1}", EIGHT.T),
        ("replica_groups=mesh[a=2,b=4] {a,b}", EIGHT.reshape(1, 8)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,3,1) {'b'}", [[0, 2], [3, 1]]),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
            EIGHT.reshape(4, 2).T.reshape(2, 4),
        ),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_groups_are_read_in_every_notation(text, expected):
    np.testing.assert_array_equal(
        collectives.groups_of(f"%x), channel_id=3, {text}, use_global_ids=true"), expected
    )


def test_no_groups_are_all_chips():
    mesh = mesh_of(pod(2, 2), 1, 2, 2, 1)
    assert collectives.groups_of("%x), channel_id=1, to_apply=%add") is None
    assert collectives.axes_of(None, mesh) == "data+fsdp"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([[0, 4], [1, 5], [2, 6], [3, 7]], "data"),
        ([[0, 2], [1, 3], [4, 6], [5, 7]], "fsdp"),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], "tensor"),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], "fsdp+tensor"),
        ([[0, 2, 4, 6], [1, 3, 5, 7]], "data+fsdp"),
        ([list(range(8))], "data+fsdp+tensor"),
    ],
)
def test_groups_belong_to_the_axes_that_their_members_differ_in(groups, axes):
    assert collectives.axes_of(np.array(groups), mesh_of(pod(2, 4), 1, 2, 2, 2)) == axes


LINK, NETWORK, SIZE = V5E.link_bandwidth, V5E.network_bandwidth, 1e9
ROW = np.arange(16).reshape(1, 16)
COLUMN = 16 * ROW
ALL = np.arange(256).reshape(1, 256)


@pytest.mark.parametrize(
    ("kind", "extents", "groups", "expected"),
    [
        ("all-gather", (8, 8), np.arange(8)[None], SIZE * 7 / 8 / LINK),  # a line
        ("all-reduce", (8, 8), np.arange(8)[None], 2 * SIZE * 7 / 8 / LINK),
        ("all-gather", (16, 16), ROW, SIZE * 15 / 16 / (2 * LINK)),  # a ring
        ("reduce-scatter", (16, 16), COLUMN, SIZE * 15 / 16 / (2 * LINK)),
        # A ring, and a line, along either axis.
        ("all-reduce", (16, 16), ALL, 2 * SIZE * 255 / 256 / (4 * LINK)),
        ("all-reduce", (4, 8), np.arange(32)[None], 2 * SIZE * 31 / 32 / (2 * LINK)),
        # Part of a ring is a line.
        ("all-gather", (16, 16), np.arange(4)[None], SIZE * 3 / 4 / LINK),
        ("collective-permute", (4, 4), np.array([[0, 0], [1, 2], [2, 1]]), SIZE / LINK),
        ("all-reduce", (4, 4), np.array([[3]]), 0),
    ],
)
def test_time_of_a_collective_is_that_of_rings_and_lines(kind, extents, groups, expected):
    mesh = mesh_of(pod(*extents), 1, *extents, 1)
    assert collectives.seconds(kind, SIZE, groups, mesh, V5E) == pytest.approx(expected)


def test_an_axis_wraps_by_the_length_of_the_whole_axis():
    chip = hardware.TPUS["v4"]
    mesh = mesh_of(pod(4, 4, 8, kind="TPU v4"), 1, 8, 16, 1)
    along_z = 16 * np.arange(8)[None]
    whole, half = (
        collectives.seconds("all-gather", SIZE, groups, mesh, chip)
        for groups in (along_z, along_z[:, :4])
    )
    assert whole == pytest.approx(SIZE * 7 / 8 / (2 * chip.link_bandwidth))
    assert half == pytest.approx(SIZE * 3 / 4 / chip.link_bandwidth)


def test_between_slices_a_chip_sends_its_share_over_the_network():
    mesh = mesh_of(pod(4, 4, slices=2), 2, 16, 1, 1)
    pairs = collectives.across_slices(mesh)
    np.testing.assert_array_equal(pairs, [[i, i + 16] for i in range(16)])
    assert collectives.axes_of(pairs, mesh) == "replica"
    assert collectives.seconds("all-reduce", SIZE, pairs, mesh, V5E) == pytest.approx(
        SIZE / NETWORK
    )
    both = 2 * SIZE * 15 / 16 / (2 * LINK) + 2 * SIZE / 16 / 2 / NETWORK
    assert collectives.seconds("all-reduce", SIZE, None, mesh, V5E) == pytest.approx(both)


SENT = """HloModule jit_step, is_scheduled=true

%add (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x.1, %y.1)
}

%begin (p: bf16[64,8]) -> (bf16[64,8], bf16[64,32], s32[2], u32[]) {
  %p = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[64,32]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=60, #
  ROOT %custom-call.1 = @ custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%go (p.1: bf16[64,8], x.2: bf16[8,64]) -> bf16[8,32] {
  %p.1 = bf16[64,8]{1,0} parameter(0)
  %x.2 = bf16[8,64]{1,0} parameter(1)
  %all-gather.2 = bf16[64,32]{1,0:T(8,128)(2,1)S(1)} all-gather(%p.1), channel_id=60, #
  ROOT %y = bf16[8,32]{1,0} convolution(%x.2, %x.2), dim_labels=bf_oi->bf
}

%end (p.2: bf16[64,8]) -> bf16[64,32] {
  %p.2 = bf16[64,8]{1,0} parameter(0)
  %all-gather.3 = bf16[64,32]{1,0} all-gather(%p.2), channel_id=60, #
  ROOT %custom-call.2 = bf16[64,32]{1,0} custom-call(%p.2, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.5 (input.5: f32[32,10]) -> f32[8,10] {
  %input.5 = f32[32,10]{1,0} parameter(0)
  %all-reduce.5 = f32[32,10]{1,0} all-reduce(%input.5), channel_id=7, replica_groups=[2,4]<=[8], to_apply=%add
  %partition-id = u32[] partition-id()
  ROOT %dynamic-slice.5 = f32[8,10]{1,0} dynamic-slice(%all-reduce.5, %partition-id), dynamic_slice_sizes={8,10}
}

%condition (t.1: (s32[], bf16[64,8])) -> pred[] {
  %t.1 = (s32[], bf16[64,8]) parameter(0)
  %n = s32[] get-tuple-element(%t.1), index=0
  %five = s32[] constant(5)
  ROOT %lt = pred[] compare(%n, %five), direction=LT
}

%body (t: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {
  %t = (s32[], bf16[64,8]) parameter(0)
  %w = bf16[64,8]{1,0} get-tuple-element(%t), index=1
  %f.1 = @ fusion(%w), kind=kCustom, calls=%begin
  %f.2 = bf16[8,32]{1,0} fusion(%w, %f.1), kind=kOutput, calls=%go
  %f.3 = bf16[64,32]{1,0} fusion(%w, %f.2), kind=kCustom, calls=%end
  ROOT %next = (s32[], bf16[64,8]) tuple(%n, %w)
}

ENTRY %main (w.1: bf16[64,8], g: f32[32,10]) -> f32[8,10] {
  %w.1 = bf16[64,8]{1,0} parameter(0)
  %g = f32[32,10]{1,0} parameter(1)
  %start = (s32[], bf16[64,8]) tuple(%w.1)
  %loop = (s32[], bf16[64,8]) while(%start), condition=%condition, body=%body
  %scattered = f32[8,10]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.5
  %both = (bf16[16,4]{1,0}, /*index=1*/f32[3]{0}) all-reduce(%w.1, %g), channel_id=8, #, to_apply=%add
  %plain = f32[2,10]{1,0} reduce-scatter(%g), channel_id=9, #, to_apply=%add
  %begun = (bf16[64,8]{1,0}, bf16[64,32]{1,0}) all-gather-start(%w.1), channel_id=10, #
  %done = bf16[64,32]{1,0} all-gather-done(%begun)
  %after-all = token[] after-all(), frontend_attributes={MegascaleRendezvousKeyName="all-reduce.71_0"}
  %send = (bf16[1,4,128]{2,1,0}, u32[], token[]) send(%w.1, %after-all), channel_id=36, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.71_0",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send-done = token[] send-done(%send), channel_id=36, is_host_transfer=true
  ROOT %last = f32[8,10]{1,0} copy(%scattered)
}
"""
SENT = SENT.replace("@", "(bf16[64,8]{1,0}, bf16[64,32]{1,0}, s32[2]{0:S(4)}, u32[]{:S(2)})")
SENT = SENT.replace(
    "#",
    "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={1}, "
    "use_global_device_ids=true",
)


def test_what_a_step_sends_counts_once_with_the_bytes_of_whole_arrays():
    mesh = mesh_of(pod(2, 4, slices=2), 2, 2, 4, 1)
    found = collectives.collectives(hlo.Program(SENT), mesh, V5E)
    assert [(c.kind, c.axis, c.count, c.bytes, c.overlapped) for c in found] == [
        # One in every round of the loop, of three fusions each, and the one that starts and ends by
        # itself.
        ("all-gather", "fsdp", 6, 6 * 64 * 32 * 2, True),
        ("all-reduce", "fsdp", 1, 16 * 4 * 2 + 3 * 4, False),
        ("all-reduce", "replica", 1, 4 * 128 * 2, True),
        ("reduce-scatter", "fsdp", 2, 32 * 10 * 4 + 4 * 2 * 10 * 4, False),
    ]
    ring = collectives.seconds("all-gather", 64 * 32 * 2, np.arange(4)[None], mesh, V5E)
    assert found[0].seconds == pytest.approx(6 * ring)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--topology=v9:2x2"],
            "--topology=v9:2x2 is not understood: write CHIP:AxB with CHIP one of v4, v5e",
        ),
        (["--topology=v5litepod-8"], "is not understood"),
        (["--topology=v5e:0x4"], "is not understood"),
        (["--topology=v5e:2x2x2"], "has 3 extents: v5e has 2, such as 4x4"),
        (["--topology=v4:4x4"], "has 2 extents: v4 has 3, such as 4x4x4"),
        (["--topology=v5e:32x32"], "is larger than a pod of 16x16: use --num_slices"),
        ([], "--topology is missing: name a pod"),
        (["--topology=v5e:2x2", "--json=/no/such/folder/a.json"], "the folder of --json="),
        (["--topology=v5e:2x2", "--config.mesh.fdsp=2"], "did you mean mesh.fsdp?"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tiny, capsys, arguments, message):
    assert command.main([f"--config={tiny}", *arguments]) == 2
    assert message in last_error(capsys)


def test_an_unknown_config_is_one_line_and_exit_code_2(capsys):
    assert command.main(["--config=configs/nothing.py", "--topology=v5e:2x2"]) == 2
    assert "config file configs/nothing.py does not exist" in last_error(capsys)


@pytest.mark.parametrize(
    "argument",
    [
        "--num_slices=0",
        "--num_slices=x",
        "--max_compiles=0",
        "--hbm_gib=nan",
        "--hbm_gib=0",
        "--hbm_gib=inf",
    ],
)
def test_an_impossible_number_is_one_line_and_exit_code_2(tiny, capsys, argument):
    """argparse ends the process for what is not a number at all."""
    try:
        code = command.main([f"--config={tiny}", "--topology=v5e:2x2", argument])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert argument.split("=")[0] in last_error(capsys)


@pytest.mark.parametrize("name", ["v4:2x2x4", "v5e:16x16", "v5p:4x8x8", "v6e:2x4"])
def test_a_topology_names_chip_and_extents(name):
    chip, extents = topology.parse(name)
    assert chip is hardware.TPUS[name.split(":")[0]]
    assert "x".join(map(str, extents)) == name.split(":")[1]


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (34.22G) exceeds available HBM (15.75G). HLO "
            "module: jit_step.",
            34.22,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 512.5M of 15.75G hbm. Exceeded hbm capacity by 1.00G.",
            512.5 / 1024,
        ),
    ],
)
def test_the_memory_that_a_program_lacks_is_read_from_the_error(text, gib):
    assert compilation.needed_bytes(RuntimeError(text)) == pytest.approx(gib * 2**30)


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: (3.0M)",
        "INTERNAL: (34.22G) exceeds available HBM",
    ],
)
def test_any_other_error_of_the_compiler_is_raised(text):
    error = RuntimeError(text)
    with pytest.raises(RuntimeError) as raised:
        compilation.needed_bytes(error)
    assert raised.value is error


def test_a_program_that_the_compiler_cannot_print_is_a_user_error():
    """As for a masked autoencoder of L/16 on v6e:4x8."""

    class Unprintable:
        def as_text(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: async-update should have 1 operands")

        def memory_analysis(self):
            names = ("argument", "output", "alias", "temp", "generated_code")
            return types.SimpleNamespace(**{f"{name}_size_in_bytes": 2**30 for name in names})

    with pytest.raises(UserError, match=r"with 3.0 GiB, but the compiler can't print it"):
        compilation.text_of(Unprintable())


PLAIN = [
    "model.dtype=bfloat16",
    "model.pool=gap",
    "model.pre_logits=False",
    "model.dropout=0",
    "data.batch_size=4096",
]


def loaded(location: str, *settings: str):
    return configs.load(location, [f"--config.{text}" for text in settings])


def job_of(config, *extents: int, slices: int = 1) -> Experiment:
    """What `compilation.on_topology` gives, for chips that only these tests know."""
    return Experiment.on_devices(config, pod(*extents, slices=slices), V5E)


@pytest.fixture(scope="module")
def large():
    """L/16 with 64 images per chip on v5e:8x8."""
    return job_of(loaded("configs/pretrain.py:L/16,imagenet2012", *PLAIN), 8, 8)


@pytest.fixture(scope="module")
def small():
    """S/16 of four layers on v5e:2x4."""
    config = loaded(
        "configs/pretrain.py:S/16,imagenet2012", *PLAIN, "model.depth=4", "data.batch_size=1024"
    )
    return job_of(config, 2, 4)


@pytest.mark.parametrize(
    ("settings", "gib", "factor"),
    [
        ({}, 6.15, 1.1),
        ({"model.scan": True, "model.remat": "dots"}, 6.84, 1.25),
        ({"model.scan": True, "model.remat": "full"}, 1.87, 2),
    ],
)
def test_activations_of_l16_are_about_those_of_the_compiler(large, settings, gib, factor):
    one = cost_model.resketch(cost_model.sketch(large), suggestions.changed(large.config, settings))
    assert gib / factor < cost_model.activation_bytes(one) / 2**30 < gib * factor


def test_memory_of_whole_steps_is_about_that_of_the_compiler(large):
    assert cost_model.guess(cost_model.sketch(large)).bytes / 2**30 == pytest.approx(
        2.88 + 6.74, rel=0.1
    )
    config = loaded(
        "configs/pretrain.py:H/14,imagenet2012", *PLAIN, "optim.momentum_dtype=bfloat16"
    )
    huge = cost_model.sketch(job_of(config, 16, 16))
    assert cost_model.state_bytes(huge)[0] / 2**30 == pytest.approx(5.90, rel=0.02)
    assert cost_model.guess(huge).bytes / 2**30 == pytest.approx(5.90 + 4.38, rel=0.25)


def test_memory_of_an_autoencoder_is_that_of_its_two_halves():
    """The compiler's figures for L/16 with 64 images per chip and fsdp=16: 0.23 + 4.0 GiB. All
    tokens in the encoder would take more than twice as much.
    """
    config = loaded("configs/mae.py:L/16", "mesh.fsdp=16")
    one = cost_model.sketch(job_of(config, 8, 8))
    assert cost_model.guess(one).bytes / 2**30 == pytest.approx(0.23 + 4.0, rel=0.3)
    classify = loaded("configs/pretrain.py:L/16,imagenet2012", *PLAIN, "mesh.fsdp=16")
    whole = cost_model.sketch(job_of(classify, 8, 8))
    assert cost_model.guess(one).ms < 0.5 * cost_model.guess(whole).ms


def test_views_of_an_image_need_less_of_the_host_than_images_of_their_own():
    """`benchmark data`: 9.98 core-ms for the ten views of configs/dino.py:s16, 2.55 for one."""
    one = loaded("configs/pretrain.py:S/16,imagenet2012")
    ten = loaded("configs/dino.py:s16")
    assert figures.core_ms(ten) / figures.core_ms(one) == pytest.approx(9.98 / 2.55, rel=0.1)


def test_a_search_tries_einsum_too_where_auto_takes_splash(large):
    """Also if the config asks for it."""
    found = {values["model.attention"] for values in search.settings(large)}
    assert found == {"auto"}
    config = suggestions.changed(large.config, {"image_size": 592, "model.attention": "einsum"})
    found = {values["model.attention"] for values in search.settings(job_of(config, 8, 8))}
    assert found == {"auto", "einsum"}


def test_more_shards_and_more_recomputation_take_less_memory(large):
    one = cost_model.sketch(large)

    def gib(**settings):
        changes = {key.replace("__", "."): value for key, value in settings.items()}
        sketch = cost_model.resketch(one, suggestions.changed(large.config, changes))
        return cost_model.guess(sketch).bytes / 2**30

    plain = gib()
    assert gib(mesh__zero=True) < plain
    assert gib(mesh__fsdp=16, mesh__data=4) < gib(mesh__fsdp=4, mesh__data=16) < plain
    assert gib(model__remat="full") < 0.6 * plain
    assert gib(model__remat="dots") == pytest.approx(plain, rel=0.02)  # 1.18 of 1.17 GiB, 4 layers
    assert plain < gib(model__scan=True)
    assert gib(accum_steps=4) < gib(accum_steps=2) < plain


def suggested(job, limit_gib: float) -> list[str]:
    """Suggestions if the compiler needs as much memory as the model says."""
    return suggestions.suggest(job, limit_gib, cost_model.guess(cost_model.sketch(job)).bytes)


def flags(text: str) -> list[str]:
    """The arguments of a suggestion."""
    return [word for word in text.split(" (about")[0].split() if word]


@pytest.mark.parametrize("limit", [3, 1.9, 1.2, 0.5])
def test_every_suggestion_can_be_pasted_and_fits_by_the_model(small, limit):
    one, texts = cost_model.sketch(small), suggested(small, limit)
    assert texts
    for text in texts:
        assert all(flag.startswith("--config.") for flag in flags(text))
        given = [
            "--config.model.depth=4",
            "--config.data.batch_size=1024",
            *(f"--config.{text}" for text in PLAIN[:-1]),
        ]
        config = configs.load("configs/pretrain.py:S/16,imagenet2012", [*given, *flags(text)])
        assert cost_model.guess(cost_model.resketch(one, config)).bytes / 2**30 < limit


def test_a_job_that_cannot_fit_says_so(small):
    (text,) = suggested(small, 0.001)
    assert text.startswith(
        "no setting of this config makes it fit into 0.00 GiB per chip: use a larger --topology"
    )


def test_a_mixer_gets_no_suggestions_for_transformers(tmp_path):
    path = tmp_path / "mixer.py"
    path.write_text(
        re.sub("config.model = .*", 'config.model = dict(variant="Mixer-S/16", depth=4)', TINY)
    )
    job = job_of(loaded(str(path), "image_size=224", "data.batch_size=512"), 2, 4)
    texts = [text for limit in (0.2, 0.5, 1.0) for text in suggested(job, limit)]
    assert any(text.startswith("--config.mesh") for text in texts)
    assert not any("remat" in text or "scan" in text for text in texts)


def test_candidates_divide_fit_and_come_fastest_first(small):
    found = search.candidates(small, 2.0)
    one, order = cost_model.sketch(small), []
    for values, config in found:
        # Raises if something does not divide.
        guess = cost_model.guess(cost_model.resketch(one, config))
        assert guess.bytes < 0.95 * 2.0 * 2**30
        order.append((search.family(values), guess.ms))
    families = [family for family, _ in order]
    seen = [families[:i].count(family) for i, family in enumerate(families)]
    first = [ms for (_, ms), before in zip(order, seen, strict=True) if before < 2]
    rest = [ms for (_, ms), before in zip(order, seen, strict=True) if before >= 2]
    assert len(set(families)) > 3 and rest
    assert [ms for _, ms in order] == sorted(first) + sorted(rest)


def test_a_search_without_a_candidate_says_so(small):
    with pytest.raises(
        NegativeResult, match=r"fit into 0\.01 GiB per chip on 8 chips: use a larger --topology"
    ):
        search.candidates(small, 0.01)


def test_the_best_plan_is_the_fastest_that_fits():
    def one(name, fits, ms, gib=1.0):
        plan = dict(step_ms=dict(low=ms, high=ms), fits=fits, hbm_gib=dict(total=gib), name=name)
        return dict(settings={"accum_steps": name}, plan=plan)

    failed = dict(settings={"accum_steps": 4}, error="no such mesh")
    best = search.best([one(1, True, 9), failed, one(2, False, 1), one(3, True, 5)])
    assert (best["name"], best["settings"]) == (3, "--config.accum_steps=3")
    assert [tried["settings"][-1] for tried in best["tried"]] == ["3", "1", "2", "4"]
    assert report.outcome(best["tried"][0]) == "5 ms, 1.00 GiB per chip: --config.accum_steps=3"
    outcome = report.outcome(best["tried"][2])
    assert outcome == "does not fit, 1.00 GiB per chip: --config.accum_steps=2"
    assert report.outcome(best["tried"][3]) == "failed (no such mesh): --config.accum_steps=4"


def test_a_search_goes_on_after_a_candidate_that_fails(small, monkeypatch, capsys):
    fitting = dict(step_ms=dict(low=3, high=3), fits=True, hbm_gib=dict(total=1.0))
    plans = iter([UserError("torn\nslices"), fitting])

    def planned(*_):
        found = next(plans)
        if isinstance(found, UserError):
            raise found
        return found

    monkeypatch.setattr(compilation, "on_topology", lambda *_: small)
    monkeypatch.setattr(run, "plan", planned)
    args = types.SimpleNamespace(
        config=small.config, topology="v5e:2x4", num_slices=1, search=True, max_compiles=2
    )
    found = run.run(args, 15.75)
    assert found["fits"]
    assert [tried.get("error") for tried in found["tried"]] == [None, "torn slices"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("1: failed (torn slices): --config.")
    assert lines[1].startswith("2: 3 ms, 1.00 GiB")


def test_if_nothing_fits_the_smallest_plan_is_the_result():
    plans = [dict(step_ms=None, fits=False, hbm_gib=dict(total=gib)) for gib in (20.0, 17.0)]
    found = search.best(
        [dict(settings={"accum_steps": i}, plan=plan) for i, plan in enumerate(plans)]
    )
    assert not found["fits"] and found["hbm_gib"]["total"] == 17.0
    assert [tried["hbm_gib"] for tried in found["tried"]] == [17.0, 20.0]
    with pytest.raises(UserError, match="none of the 1 settings could be planned: no such mesh"):
        search.best([dict(settings={}, error="no such mesh")])


def planned(job, monkeypatch, compiled, limit_gib=15.75) -> dict:
    """The plan that `compiled` would give."""
    monkeypatch.setattr(compilation, "compile_step", lambda job: compiled)
    args = types.SimpleNamespace(location="tiny.py", topology="v5e:2x4", num_slices=1)
    return run.plan(job, args, limit_gib)


def test_a_plan_has_the_keys_of_the_interface_and_adds_up(small, monkeypatch, capsys):
    compiled = compilation.Compiled(12.0, 17, 2.0**30, hlo.Program(SENT))
    plan = json.loads(json.dumps(planned(small, monkeypatch, compiled)))
    assert set(plan) >= KEYS and set(plan) - KEYS == {
        "params_split", "total_steps", "hosts", "host_cores_available", "host_network_gbps"
    }  # fmt: skip
    assert plan["fits"] and plan["suggestions"] == [] and plan["num_chips"] == 8
    parts = [plan["hbm_gib"][kind] for kind in ("params", "opt_state", "activations", "batch")]
    assert sum(parts) == pytest.approx(plan["hbm_gib"]["total"])
    assert plan["hbm_gib"]["params"] == pytest.approx(plan["params"] * 4 / 2**30)
    times = {"compute_roofline", "compute_estimate", "communication", "low", "high"}
    assert set(plan["step_ms"]) == times
    fields = {"kind", "axis", "count", "bytes", "overlapped"}
    assert all(set(found) == fields for found in plan["collectives"])
    scales = dict(mfu=plan["model_flops_per_image"] / 197e12, images_per_sec_per_chip=1)
    for key, scale in scales.items():
        for end, other in (("low", "high"), ("high", "low")):
            assert plan[key][end] == pytest.approx(1024 / 8 / plan["step_ms"][other] * 1e3 * scale)
    assert plan["chip_hours"]["high"] == pytest.approx(plan["days"]["high"] * 24 * 8)
    report.show(plan)
    printed = capsys.readouterr().out
    assert "fits: 1." in printed and "reduce-scatter" in printed and "would fit" not in printed
    assert "step" in dict(report.rows(plan))


def test_a_plan_that_does_not_fit_has_suggestions_in_lines_of_their_own(small, monkeypatch, capsys):
    compiled = compilation.Compiled(1.0, 17, 20 * 2.0**30, None)
    plan = planned(small, monkeypatch, compiled, limit_gib=1.2)
    assert set(plan) >= KEYS
    assert not plan["fits"] and plan["step_ms"] is plan["collectives"] is plan["mfu"] is None
    assert "step" not in dict(report.rows(plan))
    report.show(plan)
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith("would fit:")]
    assert shown == [f"would fit: {text}" for text in plan["suggestions"]]
    assert any("DOES NOT FIT: 20." in line for line in lines)
    assert any("0% of the parameters are split over chips" in line for line in lines)
    report.show(plan | dict(suggestions=suggested(small, 0.001)))
    assert "would fit: no setting" not in capsys.readouterr().out


def test_a_program_over_the_given_memory_does_not_fit_although_it_compiles(small, monkeypatch):
    compiled = compilation.Compiled(1.0, 17, 2.0**30, hlo.Program(SENT))
    assert not planned(small, monkeypatch, compiled, limit_gib=0.9)["fits"]


class Lowered(Exception):
    """Ends a training run when its step is lowered."""


def test_the_plan_compiles_the_very_step_that_training_runs(tiny, tmp_path, monkeypatch):
    config = loaded(tiny, "mesh.fsdp=2", "mesh.zero=True", "accum_steps=2", "prng=rbg")
    job = Experiment.on_devices(config, None, V5E)
    with jax.set_mesh(job.mesh):
        expected = job.train_step.lower(job.abstract_state, job.abstract_batch).as_text()

    def spy(experiment):
        shapes = (experiment.abstract_state, experiment.abstract_batch)
        raise Lowered(experiment.train_step.lower(*shapes).as_text())

    monkeypatch.setattr(loop, "compile_meanwhile", spy)
    with pytest.raises(Lowered) as lowered:
        folder = loop.workdir.make(str(tmp_path / "run"))
        loop.train(config, folder, spool.LocalFiles(folder))
    assert str(lowered.value) == expected
