"""One runtime and what is built over it for one tenant, all of one model.

What is planned here is run here: a reload of the model makes another runtime, and another of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from chunkcache.catalog import Catalog
from chunkcache.engine.request import GenerationJob
from chunkcache.engine.stream import Finished
from chunkcache.errors import ChunkCacheError, InvalidValueError
from chunkcache.fusion.plan import FusionPlan
from chunkcache.ingest import DocumentIngest
from chunkcache.pinning import DocumentPins
from chunkcache.planning import AskOptions, ChatTurn, PromptPlanner
from chunkcache.runtime import Runtime
from chunkcache.streaming import StreamingAnswer, new_answer_id


@dataclass(frozen=True)
class ServingModel:
    """A runtime for one tenant.

    Attributes:
        runtime: Model, store and engine.
        planner: Plans questions.
        ingest: Stores documents.
        pins: Keeps documents' entries in RAM.
    """

    runtime: Runtime
    planner: PromptPlanner
    ingest: DocumentIngest
    pins: DocumentPins

    @classmethod
    def over(cls, runtime: Runtime, catalog: Catalog) -> "ServingModel":
        """Build what one tenant needs."""
        planner = PromptPlanner(runtime, catalog)
        names, system_ids = planner.names, planner.system_ids(None)
        return cls(
            runtime,
            planner,
            DocumentIngest(runtime, catalog, names, system_ids),
            DocumentPins(runtime, catalog, names, system_ids),
        )

    def plan_chat(self, turns: Sequence[ChatTurn], options: AskOptions) -> FusionPlan:
        """What answering the last turn of a conversation would do.

        Raises:
            InvalidValueError: A turn before it has no reply, or it has one itself.
            ChunkCacheError: As in ``ChunkCache.chat``.
        """
        if not turns or [t.reply is None for t in turns] != [False] * (len(turns) - 1) + [True]:
            raise InvalidValueError("every turn but the last has a reply", param="messages")
        return self.planner.plan(turns, options, "question" if options.as_question else "chat")

    def start(self, plan: FusionPlan, options: AskOptions) -> StreamingAnswer:
        """Have a plan of this planner's run.

        Raises:
            DrainingError: The runtime is closed, or another has taken its place.
            ChunkCacheError: As in ``ChunkCache.stream``.
        """
        runtime, schema = self.runtime, options.json_schema
        job = GenerationJob(
            plan,
            options.sampling,
            options.max_tokens,
            num_answers=options.num_answers,
            stop=options.stop,
            num_top_logprobs=options.top_logprobs,
            constraint=None if schema is None else runtime.json_constraints.compile(schema),
            owner=self.ingest.catalog.namespace,
        )
        answer_id = new_answer_id()

        def on_end(end: Finished | BaseException) -> None:
            runtime.meter.record(end)
            if isinstance(end, Finished) and end.index == 0 and not options.verify:
                runtime.verifier.offer(answer_id, job, end)

        try:
            stream = runtime.engine.submit(job, on_end)
        except ChunkCacheError as error:
            # What another runtime has taken over is asked again there, and counted once.
            if runtime.current is runtime:
                runtime.meter.record(error)
            raise
        return StreamingAnswer(
            stream,
            job,
            answer_id=answer_id,
            runtime=runtime,
            is_verified=options.verify,
        )
