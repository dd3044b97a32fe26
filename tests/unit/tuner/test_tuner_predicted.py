"""What the search predicted of a plan stays in the row of its run."""

from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.levers import Facts, default_plan
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.model_first import model_first
from fulltilt.tuner.search.session import Session

USER = default_plan().replace(batch_size=64)


def test_a_whole_run_keeps_the_speed_that_chose_it_and_a_probe_has_none():
    space = Space(
        axes={"threads": (None, 1), "fused_optimizer": (False, True)}, base=USER, user_plan=USER,
        facts=Facts(device_type="cpu"), memory_gib=None,
    )  # fmt: skip
    session = Session(SimulatedTarget(lambda plan: Answer(samples_per_s=100.0 if plan["threads"] else 90.0)), Journal())
    session.run(model_first(space))
    chosen = [row for row in session.rows if "predicted" in row.why]
    assert chosen
    for row in chosen:
        said = f"predicted {row.predicted_samples_per_s:,.0f} "
        assert said in row.why or f"predicted {row.predicted_samples_per_s:.3g} " in row.why
    assert {row.predicted_samples_per_s for row in session.probes} == {None}
