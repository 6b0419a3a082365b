"""The 256 words that codes are made of; a word's place in the list is one byte.

Short, common, spelt as they sound. No two begin with the same three letters, and at least
three letters must change to make one of another, so that a slip of the tongue or of a finger
gives no other code but a word that is not here. Other machines have this list too: its words
and their order never change.
"""

from __future__ import annotations

from typing import Final

_LIST: Final = """
acorn acrobat album amber anchor ankle apron arctic arena aspen atlas autumn avocado badge
bakery balcony bamboo banana barrel basket beach blossom border bottle breeze bubble
buffalo butter cabin cactus camel canoe carpet castle cedar chalk cherry chimney circle
citrus clover cobalt coffee copper cotton cousin coyote cradle cricket crystal curtain
cushion dahlia daisy dancer dentist desert diamond dimple doctor dolphin domino donkey
dragon drummer eagle echo eclipse elbow emblem emerald engine evening eyebrow fabric
farmer feather fender fiddle flannel flute forest fossil fridge galaxy garlic ginger
giraffe glacier goblet goggles gondola goose gorilla grape guitar hammock helmet hippo
horizon hotel husky iceberg igloo indigo insect island ivory jaguar jasmine jelly jewel
jigsaw journal jungle jury kayak kernel kimono kitchen kiwi koala ladder lagoon lantern
laptop lava lemon leopard library lilac lizard lobster locket lunar magnet mango marble
meadow mermaid meteor mirror mitten morning muffin museum napkin nectar needle nephew
nickel nugget nylon oasis ocean octopus olive onion opera orange orbit orchid osprey
ostrich oxygen palace panda papaya parrot peanut pelican pencil piano pickle pigeon pilot
pirate plywood pony poplar potato prairie prism pumpkin puppet purple pyramid python
quartz quilt rabbit radio ranch raven ribbon roof rugby salmon saturn scallop scooter
shuttle signal silver siren skate sketch slipper smoke snail soccer sofa spider sponge
spring stable swan syrup teapot tennis thimble thunder toast topaz tornado tractor trumpet
tulip tundra twig umpire unicorn vacuum valley vanilla viking village vinegar violin
volcano voyage vulture waffle walnut water weasel wedding willow wombat yeti yogurt zebra
zenith zigzag zinc zodiac
"""
WORDS: Final = tuple(_LIST.split())
"""All words, in alphabetical order."""

PLACES: Final = {word: place for place, word in enumerate(WORDS)}
"""The place of each word in the list."""
