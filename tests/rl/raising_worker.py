"""A worker of tasks in which the verifier of the family `chain` raises, whatever the answer is.

python -m tests.rl.raising_worker TIMEOUT_S DRAW_TIMEOUT_S
"""

from m2forge.records import Submission, Task, Verdict
from m2forge.tasks import catalog, worker
from m2forge.tasks.agent import Chain


class Raising(Chain):
    def verify(self, task: Task, submission: Submission) -> Verdict:
        raise KeyError("a verifier that its author broke")


if __name__ == "__main__":
    catalog.EMBEDDED = (Raising(),)
    worker.main()
