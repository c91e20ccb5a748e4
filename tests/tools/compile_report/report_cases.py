"""Reports whose figures all differ, for tests of their forms."""

import dataclasses

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.tools.compile_report.bandwidth import Cost
from tpu_embedding.tools.compile_report.device_memory import Memory
from tpu_embedding.tools.compile_report.other_programs import ProgramMemory
from tpu_embedding.tools.compile_report.step_report import (
    CompileReport,
    LoopCost,
    NamedOperation,
    OperationGroup,
    ProgramTraffic,
)

MEBIBYTE = 2**20


def cost(mebibytes, links=0.0):
    return Cost(
        hbm_bytes=mebibytes * MEBIBYTE,
        ici_bytes=links * MEBIBYTE,
        dcn_bytes=0,
        hbm_seconds=mebibytes * 1.001e-5,
        ici_seconds=links * 1.003e-4,
        dcn_seconds=None,
    )


GATHER = NamedOperation(
    name="gather.1",
    operation_class="gather",
    dims=(77, 128),
    hbm_bytes=1.9 * MEBIBYTE,
    runs="every step",
    op_name="jit(step)/shard_map/gather",
    source="packed_rows.py:7",
)
REPORT = CompileReport(
    name="my step",
    topology="big:2x2",
    num_slices=1,
    num_devices=4,
    hardware=HardwareInfo(name="big", hbm_bytes_per_second=123e9),
    versions=(("jax", "0.98.7"),),
    plan="4 shards; the plan & more",
    memory=Memory(
        tables=1100 * MEBIBYTE,
        slots=310 * MEBIBYTE,
        dense=211 * MEBIBYTE,
        inputs=112 * MEBIBYTE,
        padding=13 * MEBIBYTE,
        outputs=14 * MEBIBYTE,
        temporaries=515 * MEBIBYTE,
        code=16 * MEBIBYTE,
        required=2291 * MEBIBYTE,
        available=3900 * MEBIBYTE,
        capacity=4096 * MEBIBYTE,
        fits=True,
    ),
    floor=cost(21.5, 2.25),
    traffic=ProgramTraffic(
        total=cost(99.75, 9.5),
        classes=(
            OperationGroup(name="gather", num_operations=1001, cost=cost(55.25)),
            OperationGroup(name="all-to-all", num_operations=1002, cost=cost(1, 7.75)),
        ),
        parts=tuple(
            OperationGroup(name=name, num_operations=count, cost=cost(mebibytes))
            for name, count, mebibytes in (
                *(("embedding", 1003, 66.5), ("dense", 1004, 33.125)),
                ("unattributed", 1005, 0.375),
            )
        ),
        loops=(
            LoopCost(
                op_name="jit(step)/while", source="a.py:1", per_iteration=cost(3.625)
            ),
        ),
        sparse_core=(GATHER,),
        table_copies=(),
        table_moves=(),
    ),
    trace_seconds=1.5,
    compile_seconds=2.75,
    refusal="",
)
REFUSED = dataclasses.replace(
    REPORT,
    topology="small:1x1",
    memory=dataclasses.replace(
        REPORT.memory,
        **dict.fromkeys(("padding", "outputs", "temporaries", "code")),
        capacity=2048 * MEBIBYTE,
        available=2000 * MEBIBYTE,
        fits=False,
    ),
    traffic=None,
    refusal="RESOURCE_EXHAUSTED: 2.2G exceeds <HBM>",
)
INIT = ProgramMemory(
    name="initial <slot> variables",
    memory=REPORT.memory,
    trace_seconds=0.5,
    compile_seconds=1.25,
    refusal="",
    note="one & only",
)
