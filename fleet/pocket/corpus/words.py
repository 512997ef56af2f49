"""Lists of words that the families share."""

COLOURS = "red blue green yellow black white brown orange purple pink gray golden silver".split()
OBJECTS = (
    "ball book box cup bottle chair table lamp clock phone car bike boat train plane hat coat shirt shoe bag key pen paper "
    "picture flower tree camera guitar piano door window bed spoon knife plate brush mirror letter ring watch wheel stone"
).split()
PLACES = (
    "kitchen garden bedroom garage office school park market library hospital station museum hotel forest river beach village "
    "house street bridge"
).split()
ANIMALS = (
    "dog cat horse cow sheep bird fish rabbit mouse lion tiger bear wolf fox monkey duck chicken goat pig frog snake turtle "
    "parrot hamster"
).split()
FOODS = (
    "bread cheese rice pasta soup salad fruit chocolate coffee tea milk water juice honey butter sugar cake cookies bananas "
    "potatoes tomatoes carrots apples eggs"
).split()
NAMES = (
    "peter mary john susan david anna michael sarah thomas laura daniel emma robert julia james lucy paul helen george alice "
    "henry rose frank clara oscar nina martin sofia simon grace victor maria leo kate sam ruby max lily ben ella adam eva"
).split()
CITIES = (
    "london paris berlin tokyo boston chicago madrid vienna sydney toronto rome dublin moscow cairo athens oslo lisbon "
    "denver dallas seattle"
).split()
VERBS = "sees likes wants finds buys sells paints carries follows remembers watches moves".split()
ADVERBS = "today tomorrow slowly quickly again often always never together quietly sometimes".split()
PREPOSITIONS = "in near behind under beside outside inside".split()
DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
MONTHS = "january february march april may june july august september october november december".split()
DAY_PARTS = "morning afternoon evening".split()
OTHERS = (
    "happy tired hungry quiet loud beautiful heavy bright strong little lovely simple gentle "
    "sunny cloudy rainy windy foggy warm cool sleeps runs walks sings dances swims works plays waits reads cooks travels "
    "brother sister mother father doctor teacher farmer sailor winter summer spring autumn music story dinner breakfast "
    "money paper river mountain island ocean thunder shadow voice finger shoulder elbow question number between because "
    "without before until maybe yesterday everything nothing somebody"
).split()
"""Words of no family's own, so that speech is learnt from more sounds than the answers need."""
