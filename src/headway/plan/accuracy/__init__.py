"""How well the cost model predicts: published runs, recorded runs, peers' formulas."""
