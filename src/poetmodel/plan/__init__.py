"""Plans: programs that a device executes, their simulator, files and listings."""

from poetmodel.plan.arena import Arena
from poetmodel.plan.arena_check import ArenaCheck, check_arena
from poetmodel.plan.binary import decode, encode
from poetmodel.plan.check import PlanCheck
from poetmodel.plan.program import Plan
from poetmodel.plan.simulation import check_plan
from poetmodel.plan.trace import trace_events
from poetmodel.schedule.instructions import Instruction, Op, Program
from poetmodel.schedule.machine import InstructionRecord

__all__ = [
    "Arena",
    "ArenaCheck",
    "Instruction",
    "InstructionRecord",
    "Op",
    "Plan",
    "PlanCheck",
    "Program",
    "check_arena",
    "check_plan",
    "decode",
    "encode",
    "trace_events",
]
