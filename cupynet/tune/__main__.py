"""Search for good settings: `python -m cupynet.tune optimizer.learning_rate='interval(0.001,0.3)' [key=value ...]`.

Each trial is a run in a process of its own, judged by images that are kept out of training. The test images are looked
at once, when all is done, by the best.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet import interrupts
from cupynet.checks import percent
from cupynet.errors import CupynetError, DivergedError, Interrupted
from cupynet.settings import TuneSettings
from cupynet.terminal import near

if TYPE_CHECKING:
    from cupynet.sweeps.shares import Share
    from cupynet.tune.asked import Asked
    from cupynet.tune.search import Running, Search
    from cupynet.tune.study import Study
    from cupynet.tune.tried import Tried

log = logging.getLogger(__name__)


def main() -> None:
    """The command."""
    interrupts.command(_command)


def _command() -> None:
    from cupynet import config
    from cupynet.exits import steady_streams, tell
    from cupynet.tune.asked import Given, prepare

    try:
        given = Given.of(sys.argv[1:])
    except CupynetError as error:
        steady_streams()
        raise SystemExit(tell(error)) from None
    sys.argv[1:] = given.arguments
    config.run(search, partial(prepare, given), "tune", TuneSettings)


def search(asked: Asked, folder: Path) -> float | None:
    """Try settings until there are enough trials, and tell which were best."""
    from cupynet.tune.study import Study

    settings = asked.settings
    study = Study(
        folder / "study.db",
        asked.space,
        objective=settings.objective,
        sampler=settings.sampler,
        seed=settings.sampler_seed,
        pruner=settings.pruner,
        epochs=asked.epochs,
    )
    try:
        return _searched(asked, folder, study)
    finally:
        study.close()


def _searched(asked: Asked, folder: Path, study: Study) -> float | None:
    from cupynet.resume import quoted
    from cupynet.sweeps.jobs import Job
    from cupynet.sweeps.shares import shares
    from cupynet.sweeps.table import shortened
    from cupynet.tune import told
    from cupynet.tune.search import Search, folder_of

    settings, names = asked.settings, shortened([each.name for each in asked.space])
    keys = {each.key: names[each.name] for each in asked.space}
    asked = replace(asked, shared=[*asked.shared, *_workers(asked, study)])
    _announce(asked, study)

    def begin(tried: Tried, share: Share) -> Running:
        run = f"hydra.run.dir={quoted(folder_of(folder, tried.number))}"
        return Job("cupynet.tune.trial", [*asked.shared, *told.settings_of(tried, asked.space), run], share)

    def say(tried: Tried) -> None:
        best = next(iter(study.ranked()), None)
        count = f"{study.counted} of {settings.trials}"
        log.info("%s", told.line(tried, count, settings.objective, best, keys))
        told.write_csv(folder, study.tried(), asked.space, settings.objective)

    parts = shares(settings.jobs, settings.jobs, asked.devices)
    searching = Search(study, begin, parts, settings.trials, settings.timeout_s, say)
    searching.run()
    told.write_csv(folder, study.tried(), asked.space, settings.objective)
    _say_why_it_ends(searching, study, settings)
    if searching.signal:
        goes_on = shlex.quote(f"resume={near(folder)}")
        raise Interrupted(
            searching.signal, f"{study.counted} of {settings.trials} trials are done; {goes_on} goes on with the search"
        )
    return _result(asked, folder, study)


def _workers(asked: Asked, study: Study) -> list[str]:
    """The setting that gives all trials as many workers, however many train side by side when the search goes on."""
    if asked.workers is None:
        return []
    number = study.note("workers") or study.note("workers", max(asked.workers // asked.settings.jobs, 1))
    return [f"workers={int(number)}"]


def _announce(asked: Asked, study: Study) -> None:
    """What is searched, by what, and what of it is known already."""
    settings = asked.settings
    for each in asked.space:
        log.info("searched: %s: %s", each.name, each)
    if asked.held_out:
        log.info("%s: images kept out of training, to choose by", asked.held_out)
    what = f"{settings.trials} trials of at most {asked.epochs} epoch{'s' * (asked.epochs != 1)}"
    log.info(
        "%s, by %s of the validation images; sampler %s, pruner %s",
        what, settings.objective, settings.sampler, settings.pruner,
    )  # fmt: skip
    if asked.resumed:
        log.info("going on: %d trials are done", study.counted)


def _say_why_it_ends(searching: Search, study: Study, settings: TuneSettings) -> None:
    """Where it is not because there are enough trials."""
    if searching.late:
        log.info("timeout_s=%g: no more trials begin, %d are done", settings.timeout_s, study.counted)
    elif not searching.signal and study.counted < settings.trials:
        log.info("all %d settings that there are have been tried", study.counted)


def _result(asked: Asked, folder: Path, study: Study) -> float | None:
    """Test the best trial, and tell what came of the search. The figure that was searched for; CupynetError: none."""
    from cupynet.tune import told
    from cupynet.tune.search import folder_of
    from cupynet.tune.tried import DIVERGED, INTERRUPTED

    ranked, tried, objective = study.ranked(), study.tried(), asked.settings.objective
    if not ranked:
        ended = [each for each in tried if each.outcome != INTERRUPTED]
        reason = f": trial {ended[0].number}: {ended[0].reason}" if ended else ": none was begun"
        kind = DivergedError if ended and all(each.outcome == DIVERGED for each in ended) else CupynetError
        raise kind(f"no trial came to its end{reason}")
    best = ranked[0]
    run = folder_of(folder, best.number)
    test = study.note("test")
    if test is None or test["trial"] != best.number:
        test = {"trial": best.number, **tested(run, asked.settings.trusted_modules)}
        study.note("test", test)
    told.write_best(folder, best, asked.shared, asked.space, objective, test)
    print()
    told.table(ranked, asked.space, objective)
    for line in _lines(asked, folder, study, best, test, run):
        print(line)
    return best.figure


def _lines(
    asked: Asked, folder: Path, study: Study, best: Tried, test: dict[str, Any], run: Path
) -> Sequence[str]:  # fmt: skip
    from cupynet.tune import told

    matters = study.importances()
    lines = [""]
    if matters:
        shares = ", ".join(f"{key.lstrip('+')} {percent(share, 0)}" for key, share in matters.items())
        lines.append(f"what matters    {shares}")
    lines += [
        f"best trial      {best.number}, {asked.settings.objective} "
        f"{told.figure(best.figure, asked.settings.objective)} of the validation images",
        f"test images     accuracy {percent(test['accuracy'])}, loss {test['loss']:.4g} (looked at once, "
        "by this trial)",
        f"its run         {near(run)}",
        f"the same again  {told.command([*asked.shared, *told.settings_of(best, asked.space)])}",
        f"or              {told.command([f'--config-dir={folder}', 'experiment=best'])}",
        f"all trials      {near(folder / 'tune.csv')}",
    ]
    return lines


def tested(run: Path, trusted_modules: Sequence[str]) -> dict[str, float]:
    """The weights of a run, evaluated on the test images that it has not seen."""
    from cupynet import config
    from cupynet.evaluate import check_same_classes, check_same_data, normalized_as, without_training
    from cupynet.experiment import Experiment
    from cupynet.runs import Run
    from cupynet.tune.judged import figures

    summary = Run(run).summary()
    settings = config.load(run, [f"workers={summary.workers}"], trusted_modules)
    experiment = Experiment(normalized_as(without_training(settings), summary.normalize))
    data = experiment.load()
    check_same_data(data.name, summary)
    check_same_classes(experiment.source.class_names, summary.class_names or ())
    with experiment.wrapper(callbacks=()) as wrapper:
        wrapper.model.load_weights(Run(run).weights())
        return figures(wrapper.evaluate(experiment.evaluation_loader(data.test)))


if __name__ == "__main__":
    main()
