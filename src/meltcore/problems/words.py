"""The words problems are told with. Few and short, so that each is one token and none is its own puzzle."""

# ruff: noqa: SIM905 - a list of words is best read as words

NAMES = """Ada Ben Cora Dan Eva Finn Gus Hana Ivan Jack Kim Lena Mia Noah Olga Paul Rosa Sam Tess Uma Vera Will Yara
Zoe""".split()

ITEMS = """pears plums nuts figs eggs rolls cups pens maps keys rings bells caps beads boots shells stones ropes lamps
drums kites books cards masks""".split()

GOODS = "chairs tables clocks bags brooms vases spoons plates jars rugs carts tents saws nets axes coats".split()

TOWNS = "Oslo Rome Lima Cairo Paris Delhi Tokyo Quito Milan Perth Lyon Bonn Turin Ghent Malmo Porto".split()

ASIDES = [
    "The wind was cold that morning.",
    "Nobody saw the grey cat again.",
    "It rained for most of the week.",
    "The clerk wrote everything down by hand.",
    "A train passed just before noon.",
    "The old gate was painted green.",
    "Someone left the door open.",
    "The market closes early in winter.",
    "Two dogs slept under the bench.",
    "The road to the mill is steep.",
    "Every page was checked with care.",
    "The lake froze in the first month.",
]
