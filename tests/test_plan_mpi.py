"""The plan under mpiexec: measured between ranks, told once. No time is asserted."""

from __future__ import annotations

import json

from cupynet.parallel.forecast import Costs
from cupynet.settings import AS_RANKS
from tests.mpi import needs_mpi, under_mpiexec
from tests.test_train import QUICK, run

pytestmark = needs_mpi


def test_a_plan_measures_between_ranks(tmp_path) -> None:
    options = ["repeats=1", "images=600", "workers=[2]", "link=measured", "micro_batches=2", "modes=[averaging]"]
    quick = [*QUICK, *options, AS_RANKS]
    done = under_mpiexec(2, "-m", "cupynet.plan", *quick, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("outputs/plan/*/*/plan.json")
    result = json.loads(file.read_text())
    costs = Costs.of(result["costs"])
    assert costs.average.local_s > 0 and costs.across is None and [step.name for step in costs.steps][-1] == "output"
    assert result["cluster"]["machines"] == 1 and result["cluster"]["link"]["latency_s"] == costs.local.latency_s
    assert done.stdout.count("Recommended over measured") == 1


def test_a_plan_of_ranks_starts_none_and_needs_two(tmp_path) -> None:
    for option, way_out in (("check=true", "check=true starts ranks itself"), ("check=false", "mpiexec -n 2 or more")):
        _, stderr = run(tmp_path, option, AS_RANKS, command="plan", code=2)
        assert stderr.startswith("cupynet: launcher=mpi: measures between the ranks that there are: " + way_out)
