"""`headway doctor`: which of its two examinations is wanted, whose run answers, and its exit code."""

import asyncio
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.doctor.asking import ask_all, tokens_of
from headway.doctor.before import Level, examine
from headway.doctor.written import as_json, findings_json, findings_text, table, verdict
from headway.doctor_options import DoctorOptions, progress_of, targets
from headway.tenants_table import tenant_lines
from services.config.models import ProcessConfig
from services.diagnosis.asked import AskedProcess, Condition
from services.diagnosis.culprits import Diagnosis, diagnose
from services.diagnosis.verdict import verdict_on
from services.local_processes import command_of
from services.run_lock import holder_of
from services.standard_output import harmless

_SECOND_LOOK_S = 2.0


def doctor(configs: Mapping[str, ProcessConfig], options: DoctorOptions) -> int:
    """Prints what was found; 0 if all is well, 1 if not."""
    return asyncio.run(_doctor(configs, options))


async def _doctor(configs: Mapping[str, ProcessConfig], options: DoctorOptions) -> int:
    procs = [] if options.before else await ask_all(targets(configs, options), tokens=tokens_of(configs))
    if not (options.more and not configs) and all(proc.condition is Condition.DEAD for proc in procs):
        return await _before(configs, options)
    diagnosis = diagnose(procs)
    if diagnosis.by_waiting or any(map(_may_be_busy, procs)):
        procs, diagnosis = await _second_look(configs, options, procs)
    if options.as_json:
        sys.stdout.write(as_json(procs=procs, diagnosis=diagnosis))
    else:
        sentence = verdict_on(procs, diagnosis).text
        tenants = "".join(f"{line}\n" for line in _tenants_of(procs))
        told = f"{table(procs)}\n{tenants}{whose(configs, procs)}{verdict(diagnosis)}"
        sys.stdout.write(harmless(f"verdict: {sentence}\n\n{told}"))
    return 1 if diagnosis.culprits else 0


def _tenants_of(procs: Sequence[AskedProcess]) -> list[str]:
    """The tenants of a learner that serves training loops, with an empty line below them."""
    served = [proc.status.tenants for proc in procs if proc.status is not None and proc.status.tenants is not None]
    return [line for tenants in served for line in (*tenant_lines(tenants), "")]


def _may_be_busy(proc: AskedProcess) -> bool:
    """True for a process that takes connections and did not answer in time, though nothing has stopped it."""
    return proc.condition is Condition.HANGS and not (proc.process is not None and proc.process.is_stopped)


def whose(configs: Mapping[str, ProcessConfig], procs: Sequence[AskedProcess]) -> str:
    """Says it if what answers at the addresses of the config file is of another run; empty if it is of this one."""
    folder = next((config.run.folder for config in configs.values()), None)
    learners = [proc.status for proc in procs if proc.kind == "learner" and proc.status is not None]
    if folder is not None and not learners and holder_of(folder) is None:
        return _of_nobody(folder, procs)
    if folder is None or not learners or learners[0].host != socket.gethostname():
        return ""
    holder, learner = holder_of(folder), learners[0]
    if holder is not None and holder.pid == learner.pid:
        return ""
    command = command_of(learner.pid) or "not known"
    runs = f"which is that of {holder}" if holder is not None else "which does not run"
    return (
        f"The learner that answers is process {learner.pid} ({command}), and not of the run in {folder}, {runs}: what "
        "follows is about another run. Name the right file or run.name, or stop the other run.\n\n"
    )


def _of_nobody(folder: Path, procs: Sequence[AskedProcess]) -> str:
    """Without a learner, those that answer may be of a run that starts, or ended, or of another one."""
    here = [one.status for one in procs if one.status is not None and one.status.host == socket.gethostname()]
    whose = [f"{one.service}: process {one.pid} ({command_of(one.pid) or 'not known'})" for one in here]
    lines = "".join(f"    {line}\n" for line in whose)
    return f"No learner has the run in {folder} yet. Those that answer here are\n{lines}\n" if lines else ""


async def _before(configs: Mapping[str, ProcessConfig], options: DoctorOptions) -> int:
    findings = await examine(configs)
    if options.as_json:
        sys.stdout.write(findings_json(findings))
    else:
        why = "as asked for" if options.before else "no process of the config file answers"
        sys.stdout.write(f"before a start ({why}):\n\n{findings_text(findings)}")
    return 1 if any(finding.level is Level.ERROR for finding in findings) else 0


async def _second_look(
    configs: Mapping[str, ProcessConfig], options: DoctorOptions, procs: Sequence[AskedProcess]
) -> tuple[list[AskedProcess], Diagnosis]:
    """Whoever has got on with its work meanwhile is slow, and no culprit; nor is one that answers now."""
    await asyncio.sleep(_SECOND_LOOK_S)
    again = await ask_all(targets(configs, options), tokens=tokens_of(configs))
    before, after = progress_of(procs), progress_of(again)
    at_work = frozenset(name for name, now in after.items() if name in before and now != before[name])
    return again, diagnose(again, at_work=at_work)
