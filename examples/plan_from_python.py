"""Plans without the command line: the best plan, the cost of another mesh, and scaling.

python examples/plan_from_python.py
"""

from headway.hardware import parse_on
from headway.plan.plan import plan
from headway.plan.settings import Mesh
from headway.plan.task import SearchSpace
from headway.recipe import Data, Model, Recipe, Train

MODEL = Model(vocab_size=128_256, layers=32, dim=4096, heads=32, kv_heads=8, hidden=14_336, tie_embeddings=False)
RECIPE = Recipe(
    name="eight-billion",
    model=MODEL,
    data=Data(path="data/corpus", seq=8192),
    train=Train(steps=10_000, batch=512, dtype="bfloat16", compile=True),
)


def main() -> None:
    """Print the best plan, another mesh and three cluster sizes."""
    planned = plan(RECIPE, parse_on("h100x8x4"), price=2.5)
    best = planned.best.estimate
    print(f"best of {planned.result.tried}: {best.settings.mesh.describe()}, microbatch {best.settings.microbatch}")
    print(f"  {best.step.seconds:.1f} s per step, MFU {best.mfu:.0%}, {best.memory.total / 2**30:.0f} GB per device")
    print(f"  {planned.run.days:.1f} days, ${planned.run.cost:,.0f}")
    for account, seconds in best.step.accounts.items():
        print(f"  {account:<24}{seconds / best.step.seconds:>6.1%}")

    other = plan(RECIPE, parse_on("h100x8x4"), choices=SearchSpace(mesh=Mesh(shard=4, tensor=8))).best.estimate
    print(f"{other.settings.mesh.describe()}: {other.step.seconds / best.step.seconds - 1:.0%} slower")

    for nodes in (1, 4, 16):
        estimate = plan(RECIPE, parse_on(f"h100x8x{nodes}")).best.estimate
        print(f"{nodes:>3} nodes: {estimate.tokens_s:>9,.0f} tokens/s, {estimate.settings.mesh.describe()}")


if __name__ == "__main__":
    main()
