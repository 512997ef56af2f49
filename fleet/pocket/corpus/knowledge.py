"""What Pocket knows by heart: colours, opposites and simple facts. All rows are trained; phrasings are held out."""

from fleet.pocket.corpus.table import Table, pairs

COLOURS = (
    Table(
        asks=[
            "what colour is {thing}", "what is the colour of {thing}", "which color is {thing}", "tell me the color of {thing}",
            "do you know the colour of {thing}", "can you tell me the colour of {thing}", "what color is {thing}",
            "which colour has {thing}", "what colour has {thing}", "tell me which color {thing} is",
            "do you know the color of {thing}",
            "can you tell me what colour {thing} has", "do you know which colour {thing} is", "what is {thing} like in colour",
        ],
        new_asks=["do you know what color {thing} is", "tell me what colour {thing} is"],
        answer="{thing} is {colour}",
        rows=pairs("thing colour", """
            the_sky blue, the_sun yellow, the_grass green, snow white, coal black, blood red, milk white, chocolate brown,
            a_lemon yellow, a_carrot orange, a_tomato red, a_banana yellow, a_frog green, an_elephant gray, a_flamingo pink,
            a_strawberry red, a_plum purple, a_leaf green, a_polar_bear white, a_pumpkin orange, the_night black, honey golden,
            the_sea blue, a_cherry red
        """),
    ),
    Table(
        asks=[
            "what do {one} and {two} make", "what colour do {one} and {two} make", "what do you get from {one} and {two}",
            "what do i get if i mix {one} and {two}", "mix {one} and {two}", "what do i get from {one} and {two}",
            "what colour do you get from {one} and {two}", "what colour is {one} and {two}",
            "if i mix {one} and {two} what do i get",
            "what colour do you get if you mix {one} and {two}", "which colour do {one} and {two} make",
            "what does {one} and {two} make",
            "what do we get if we mix {one} and {two}", "tell me what {one} and {two} make",
            "what colour do i get if i mix {one} and {two}",
        ],
        new_asks=["what colour do i get from {one} and {two}", "what do you get if you mix {one} and {two}"],
        answer="{one} and {two} make {mixed}",
        rows=pairs("one two mixed", """
            red yellow orange, yellow red orange, blue yellow green, yellow blue green, red blue purple, blue red purple,
            red white pink, white red pink, black white gray, white black gray
        """),
    ),
)  # fmt: skip

_ONE_WAY = """
    hot cold, big small, tall short, fast slow, good bad, happy sad, day night, up down, left right, open closed, old new,
    rich poor, hard soft, heavy light, wet dry, clean dirty, full empty, loud quiet, early late, first last, black white,
    high low, thick thin, wide narrow, strong weak, deep shallow, near far, inside outside, above below, always never,
    yes no, push pull, win lose, buy sell, begin end, true false, sweet sour, rough smooth, brave afraid, hello goodbye
"""

OPPOSITES = (
    Table(
        asks=[
            "what is the opposite of {one}", "tell me the opposite of {one}", "the opposite of {one}",
            "do you know the opposite of {one}", "give me the opposite of {one}", "which word is the opposite of {one}",
        ],
        new_asks=["can you tell me the opposite of {one}", "the opposite of {one} is what"],
        answer="the opposite of {one} is {two}",
        rows=[*pairs("one two", _ONE_WAY), *pairs("two one", _ONE_WAY)],
    ),
)  # fmt: skip

CAPITAL_ASKS = (
    "what is the capital of {country}", "tell me the capital of {country}", "do you know the capital of {country}",
    "which city is the capital of {country}", "the capital of {country}",
)  # fmt: skip
NEW_CAPITAL_ASKS = ("can you tell me the capital of {country}", "what city is the capital of {country}")

FACTS = (
    Table(
        asks=CAPITAL_ASKS,
        new_asks=NEW_CAPITAL_ASKS,
        answer="the capital of {country} is {city}",
        rows=pairs("country city", """
            france paris, england london, germany berlin, spain madrid, italy rome, japan tokyo, china beijing, russia moscow,
            egypt cairo, greece athens, austria vienna, portugal lisbon, poland warsaw, sweden stockholm, norway oslo,
            canada ottawa, ireland dublin, cuba havana, peru lima, kenya nairobi
        """),
    ),
    Table(
        asks=["what does {who} say", "what sound does {who} make", "tell me what {who} says", "which sound does {who} make"],
        new_asks=["do you know what {who} says", "do you know what sound {who} says"],
        answer="{who} says {sound}",
        rows=pairs("who sound", """
            a_cow moo, a_dog woof, a_cat meow, a_sheep baa, a_duck quack, a_horse neigh, a_pig oink, a_bird tweet,
            a_lion roar, a_bee buzz, a_snake hiss, a_mouse squeak, a_frog croak, an_owl hoot
        """),
    ),
    Table(
        asks=["how many legs does {who} have", "how many legs has {who}", "tell me how many legs {who} has"],
        new_asks=["do you know how many legs {who} has"],
        answer="{who} has {legs} legs",
        rows=pairs("who legs", """
            a_dog four, a_cat four, a_horse four, a_cow four, a_spider eight, a_bird two, a_chicken two, an_ant six,
            a_bee six, a_fish no, a_snake no, a_crab ten
        """),
    ),
    Table(
        asks=["what is a young {parent}", "what is a young {parent} called", "what do you call a young {parent}"],
        new_asks=["do you know what a young {parent} is called"],
        answer="a young {parent} is a {child}",
        rows=pairs("parent child", """
            dog puppy, cat kitten, cow calf, horse foal, sheep lamb, pig piglet, bear cub, duck duckling, frog tadpole,
            goat kid, chicken chick, lion cub
        """),
    ),
    Table(
        asks=["how many sides does {shape} have", "how many sides has {shape}", "tell me how many sides {shape} has"],
        new_asks=["do you know how many sides {shape} has"],
        answer="{shape} has {sides} sides",
        rows=pairs("shape sides", "a_triangle three, a_square four, a_pentagon five, a_hexagon six, an_octagon eight"),
    ),
    Table(
        asks=["what do {who} make", "tell me what {who} make", "can you tell me what {who} make"],
        new_asks=["do you know what {who} make"],
        answer="{who} make {what}",
        rows=pairs("who what", """
            bees honey, cows milk, chickens eggs, spiders webs, bakers bread, cooks dinner, writers books, painters pictures
        """),
    ),
    Table(
        asks=["where do {who} live", "tell me where {who} live", "can you tell me where {who} live"],
        new_asks=["do you know where {who} live"],
        answer="{who} live {where}",
        rows=pairs("who where", """
            fish in_the_water, bees in_a_hive, birds in_a_nest, camels in_the_desert, whales in_the_sea, worms in_the_ground,
            kings in_a_castle, penguins in_the_cold
        """),
    ),
)  # fmt: skip
