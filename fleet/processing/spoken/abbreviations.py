"""Words with a full stop that does not end a sentence, and words that no pause follows."""

TITLES = {
    "Mr": "Mister",
    "Mrs": "Missus",
    "Ms": "Miz",
    "Dr": "Doctor",
    "Prof": "Professor",
    "Rev": "Reverend",
    "Hon": "Honorable",
    "Gen": "General",
    "Gov": "Governor",
    "Sen": "Senator",
    "Rep": "Representative",
    "Capt": "Captain",
    "Lt": "Lieutenant",
    "Col": "Colonel",
    "Sgt": "Sergeant",
    "Fr": "Father",
    "Mt": "Mount",
    "Ft": "Fort",
}
"""Titles and what they stand for, before a name."""
EXPANSIONS = {
    "e.g.": "for example",
    "i.e.": "that is",
    "etc.": "et cetera",
    "vs.": "versus",
    "approx.": "approximately",
    "cf.": "compare",
    "et al.": "and others",
    "a.k.a.": "also known as",
    "incl.": "including",
    "excl.": "excluding",
    "max.": "maximum",
    "min.": "minimum",
    "est.": "established",
    "dept.": "department",
    "Dept.": "Department",
    "Inc.": "Incorporated",
    "Ltd.": "Limited",
    "Corp.": "Corporation",
    "Co.": "Company",
    "Jr.": "Junior",
    "Sr.": "Senior",
    "Ave.": "Avenue",
    "Blvd.": "Boulevard",
    "Rd.": "Road",
    "Apt.": "Apartment",
    "w/o": "without",
    "w/": "with",
}
"""Abbreviations and what they stand for, anywhere."""
NUMBERED = {
    "No.": "number",
    "no.": "number",
    "Nos.": "numbers",
    "Fig.": "figure",
    "fig.": "figure",
    "p.": "page",
    "pp.": "pages",
    "Vol.": "volume",
    "vol.": "volume",
    "Ch.": "chapter",
    "ch.": "chapter",
    "Sec.": "section",
    "sec.": "section",
    "Eq.": "equation",
}
"""Abbreviations before a number."""
NEVER_LAST = {f"{title.lower()}." for title in TITLES} | set(
    "e.g. i.e. vs. approx. cf. incl. excl. al. st. a.k.a.".split()
)
"""Words in lower case after which a sentence never ends."""
AMBIGUOUS = {name.lower() for name in NUMBERED} | set(
    "etc. inc. ltd. co. corp. jr. sr. dept. ave. blvd. rd. min. max.".split()
)
"""Words in lower case that end a sentence only before a capital letter."""
WEAK_WORDS = set(
    "a an the of to in on at by for with from as and or but nor if that than is are was were be "
    "been am do does did has have had will would can could may might must shall should not no my "
    "your his her its our their this these those very so too more most into over under about "
    "between through".split()
)
"""Words that belong to the next word: no pause separates them."""
