"""Loops: how often they turn, where the program says so."""

import jax
import jax.numpy as jnp
import pytest

from tpu_embedding.tools.compile_report.hlo import parse_module
from tpu_embedding.tools.compile_report.trip_counts import trip_count

LOOP = """
%body (state: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %state = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[4]{{0}} get-tuple-element(%state), index=1
  %limit = s32[] get-tuple-element(%state), index=2
  %step = s32[] constant({step})
  %next = s32[] {update}
  ROOT %out = (s32[], f32[4]{{0}}, s32[]) tuple(%next, %x, %limit)
}}

%condition (state.1: (s32[], f32[4], s32[])) -> pred[] {{
  %state.1 = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit.1 = s32[] get-tuple-element(%state.1), index=2
  %ten = s32[] constant(10)
  ROOT %go = pred[] compare({compare}), direction={direction}
}}

ENTRY %main (x.1: f32[4], n: s32[]) -> f32[4] {{
  %x.1 = f32[4]{{0}} parameter(0)
  %n = s32[] parameter(1)
  %begin = s32[] constant({begin})
  %copy = s32[] copy(%begin)
  %seven = s32[] constant(7)
  %tuple = (s32[], f32[4]{{0}}, s32[]) tuple(%copy, %x.1, %{limit})
  %while = (s32[], f32[4]{{0}}, s32[]) while(%tuple), condition=%condition, body=%body
  ROOT %result = f32[4]{{0}} get-tuple-element(%while), index=1
}}
"""

USUAL = {
    "begin": 0,
    "step": 1,
    "update": "add(%i, %step)",
    "compare": "%i.1, %ten",
    "direction": "LT",
    "limit": "seven",
}


def turns(text):
    module = parse_module(text)
    return trip_count(module.entry.instructions["while"], module.entry, module)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 10),
        ({"begin": 3}, 7),
        ({"begin": 10}, 0),
        ({"begin": 99}, 0),
        ({"step": 3}, 4),
        ({"direction": "LE"}, 11),
        ({"direction": "NE"}, 10),
        ({"direction": "NE", "step": 3}, None),
        ({"direction": "EQ"}, None),
        ({"compare": "%ten, %i.1", "direction": "GT"}, 10),
        ({"begin": 30, "step": -2, "direction": "GT"}, 10),
        ({"begin": 30, "update": "subtract(%i, %step)", "direction": "GE"}, 21),
        ({"step": -1}, None),
        ({"step": 0}, None),
        # The limit rides along in the state.
        ({"compare": "%i.1, %limit.1"}, 7),
        ({"compare": "%i.1, %limit.1", "limit": "n"}, None),
        ({"update": "multiply(%i, %step)"}, None),
        ({"update": "add(%i, %limit)"}, None),
        ({"begin": "-3"}, 13),
    ],
    ids=str,
)
def test_counters(changes, expected):
    assert turns(LOOP.format(**USUAL | changes)) == expected


def test_the_compilers_own_word_comes_first():
    text = LOOP.format(**USUAL).replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"12"}}'
    )
    assert turns(text) == 12


def test_comparison_inside_a_fusion():
    text = LOOP.format(**USUAL)
    fused = """
%fused (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  %two = s32[] constant(2)
  %sum = s32[] add(%a, %two)
  ROOT %less = pred[] compare(%sum, %b), direction=LT
}
"""
    text = fused + text.replace(
        "compare(%i.1, %ten), direction=LT",
        "fusion(%i.1, %ten), kind=kLoop, calls=%fused",
    )
    assert turns(text) == 8


def turns_of_all_loops(function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    module = parse_module(text)
    return [
        trip_count(instruction, computation, module)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "while"
    ]


@pytest.mark.parametrize("num_turns", [3, 9, 100])
def test_loops_of_jax(num_turns):
    def run(x):
        return jax.lax.fori_loop(0, num_turns, lambda i, x: jnp.sin(x) * i, x)

    assert turns_of_all_loops(run, jnp.ones(1000)) == [num_turns]


def test_data_decide():
    def run(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)

    assert turns_of_all_loops(run, jnp.ones(8)) == [None]
