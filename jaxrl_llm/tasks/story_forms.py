"""How the word problems of stories.py are told.

In braces: {name}, {he}, {He}, {friend}, {things}, {boxes}; {a} and {b}, the numbers of what happens; {v}, how many
there were before it; {all} = v x a; {less} = a - 1. No form says how many there are after it.
"""

NAMES = [
    *((name, "she") for name in ("Maya", "Ines", "Grace", "Lena", "Priya", "Sofia", "Amara", "Yuki", "Nora", "Elif")),
    *((name, "she") for name in ("Hannah", "Zofia", "Carmen", "Tara", "Mina", "Ruth")),
    *((name, "he") for name in ("Omar", "Ben", "Kofi", "Luis", "Jonas", "Arjun", "Pavel", "Hugo", "Tomas", "Idris")),
    *((name, "he") for name in ("Felix", "Noah", "Kenji", "Samuel", "Rui", "Viktor")),
]
_THINGS = """
marbles stickers apples pencils cookies shells beads buttons postcards stamps oranges candles coins ribbons
plums badges crayons muffins walnuts keys
"""
THINGS = _THINGS.split()
BOXES = ["boxes", "bags", "baskets", "jars", "crates", "trays"]

FORMS = {
    "have": (
        "{name} has {v} {things}.",
        "{name} starts the day with {v} {things}.",
        "There are {v} {things} on {name}'s table.",
        "In the morning {name} counts {v} {things}.",
        "{name} keeps {v} {things} in a drawer.",
        "{name} owns {v} {things}.",
    ),
    "groups": (
        "{name} has {a} {boxes} with {v} {things} in each.",
        "{name} fills {a} {boxes}, and every one of them holds {v} {things}.",
        "There are {a} {boxes} in {name}'s shop, each with {v} {things} in it.",
        "{name} sorts all the {things} into {a} {boxes} of {v} each.",
        "{name} gets {a} {boxes} from a neighbour; in each there are {v} {things}.",
    ),
    "share": (
        "{name} and {less} friends share {all} {things} equally. {name} takes the whole of one share home.",
        "{all} {things} are dealt out evenly to {a} children, one of whom is {name}.",
        "{name} is one of {a} pupils among whom {all} {things} are divided equally.",
        "{a} players split {all} {things} so that all get the same number. {name} is one of the players.",
    ),
    "gain": (
        "Then {he} gets {a} more {things}.",
        "{name} buys {a} more {things}.",
        "{name} is given {a} {things} by {friend}.",
        "Later {he} finds {a} {things}.",
        "On the way home {he} picks up {a} more {things}.",
        "There are {a} {things} for {name} in the mail.",
        "{He} wins {a} {things} in a game.",
    ),
    "lose": (
        "Then {he} gives {a} {things} to {friend}.",
        "{name} loses {a} of the {things}.",
        "{He} sells {a} {things} at the market.",
        "{name} lends {a} {things} to {friend} and never sees them again.",
        "{a} of the {things} turn out to be broken, and {he} throws them away.",
        "{name} leaves {a} {things} at school.",
        "In a game {he} has to hand over {a} {things}.",
    ),
    "times": (
        "Over the summer the number of {name}'s {things} grows to {a} times what it was.",
        "A year later {he} has {a} times as many {things} as that.",
        "{name} works hard until {he} has {a} times that number of {things}.",
        "Then a lucky trade leaves {name} with {a} times as many {things}.",
    ),
    "packs": (
        "Then {he} buys {a} {boxes} with {b} {things} in each.",
        "{name} gets {a} {boxes} of {b} {things} each from {friend} as a present.",
        "{name} orders {a} packets more, with {b} {things} in every packet.",
        "For {a} days in a row {he} collects {b} {things} a day.",
        "On each of the next {a} weekends {he} finds {b} {things}.",
    ),
    "count": (
        "How many {things} does {name} have now?",
        "How many {things} is that for {name}?",
        "What number of {things} does {name} have in the end?",
        "With how many {things} does {name} end up?",
    ),
    "price": (
        "{name} sells all of them for {a} dollars each. How many dollars does {he} get?",
        "Each of the {things} is worth {a} dollars. How many dollars are {name}'s {things} worth together?",
        "{He} needs {a} minutes to paint one of the {things}. How many minutes does {he} need to paint all of them?",
        "Each of them weighs {a} grams. How many grams do {name}'s {things} weigh together?",
    ),
    "bags": (
        "{name} packs them into bags of {a}. How many full bags does that make?",
        "{He} makes gifts with {a} {things} in each. For how many whole gifts do {name}'s {things} suffice?",
        "A shelf has room for {a} {things}. How many shelves can {name} fill completely?",
        "{He} lays them out in rows of {a}. How many complete rows are there?",
    ),
    "rest": (
        "{name} packs them into as many full bags of {a} as possible. How many {things} are left over?",
        "{He} puts {a} {things} into each box, as long as there are enough to fill one. How many remain?",
        "{He} lays them out in rows of {a}, and only complete rows count. How many {things} are not in a row?",
        "{name} hands them out evenly to {a} friends, as many as possible. How many {things} cannot be handed out?",
    ),
    "more": (
        "{friend} has {a} more {things} than {name} has now. How many does {friend} have?",
        "Now {name} has {a} fewer than {friend}. How many {things} does {friend} have?",
        "To fill an album {name} still needs {a} {things}. How many does a full album take?",
        "{friend} has as many {things}, and {a} besides. How many does {friend} have?",
    ),
    "fewer": (
        "{friend} has {a} fewer {things} than {name} has now. How many does {friend} have?",
        "Now {name} has {a} more than {friend}. How many {things} does {friend} have?",
        "{a} of them are red, and the others are blue. How many of {name}'s {things} are blue?",
        "{name} would like to keep just {a} {things}. How many does {he} have to give away?",
    ),
    "together": (
        "{friend} has {a} times as many {things} as {name} has now. How many do the two have together?",
        "{name}'s school has {a} times as many {things} as {name} has now. How many are there at both places in all?",
        "{friend} collects {a} times that number of {things}. How many {things} do {name} and {friend} have in total?",
    ),
}
# What each equation of the worked solution says, in the order of `stories._reckoned`.
WHY = {
    "have": (),
    "groups": ("{a} times {v} {things}:",),
    "share": ("An equal share of {all} {things} for one of {a}:",),
    "gain": ("{a} more than {v}:",),
    "lose": ("{a} fewer than {v}:",),
    "times": ("{a} times as many as {v}:",),
    "packs": ("{a} times {b} more {things}:", "Added to the {v} from before:"),
    "count": (),
    "price": ("{a} for each of {v} {things}:",),
    "bags": ("As many of {v} as can be divided by {a}, divided by {a}:",),
    "rest": ("What {v} has above a multiple of {a}:",),
    "more": ("{a} more than {v}:",),
    "fewer": ("{a} fewer than {v}:",),
    "together": ("{a} times as many as {v}:", "Both together:"),
}
