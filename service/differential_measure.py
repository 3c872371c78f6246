"""One differential plan measured on one vLLM, the watched one or its peer."""

from ..monitors.differential.facts import NAME, DifferentialPlan, DifferentialReading
from ..monitors.wire import MeasureOrder, ModelFacts
from .job import Note
from .measuring import Measurer


async def read_states(
    measurer: Measurer, plan: DifferentialPlan, facts: ModelFacts, engine: int, note: Note, *, before: int = 0
) -> tuple[DifferentialReading, int]:
    """The reading of the whole plan on one engine, and how many steps it took.

    `facts` are those of the model before; with other gates or faults afterwards the numbers would mix two models.
    Raises `ScanError` or `ProbeError`.
    """
    order = MeasureOrder(monitor=NAME, plan=plan.model_dump(mode="json"), engine=engine)
    progress = await measurer.run(order, facts, note, before=before)
    await measurer.same_model(facts)
    return DifferentialReading.model_validate(progress.reading), progress.steps_done
