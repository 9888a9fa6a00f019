"""Validates codes of languages."""

import difflib
import re

# ISO 639-1: the code, its three-letter forms in ISO 639-2, and the name in English.
ISO_639 = """
aa aar Afar, ab abk Abkhazian, ae ave Avestan, af afr Afrikaans, ak aka Akan, am amh Amharic, an
arg Aragonese, ar ara Arabic, as asm Assamese, av ava Avaric, ay aym Aymara, az aze Azerbaijani,
ba bak Bashkir, be bel Belarusian, bg bul Bulgarian, bh bih Bihari languages, bi bis Bislama, bm
bam Bambara, bn ben Bangla, bo bod tib Tibetan, br bre Breton, bs bos Bosnian, ca cat Catalan,
ce che Chechen, ch cha Chamorro, co cos Corsican, cr cre Cree, cs ces cze Czech, cu chu Church
Slavic, cv chv Chuvash, cy cym wel Welsh, da dan Danish, de deu ger German, dv div Divehi, dz
dzo Dzongkha, ee ewe Ewe, el ell gre Greek, en eng English, eo epo Esperanto, es spa Spanish, et
est Estonian, eu baq eus Basque, fa fas per Persian, ff ful Fulah, fi fin Finnish, fj fij
Fijian, fo fao Faroese, fr fra fre French, fy fry Western Frisian, ga gle Irish, gd gla Gaelic,
gl glg Galician, gn grn Guarani, gu guj Gujarati, gv glv Manx, ha hau Hausa, he heb Hebrew, hi
hin Hindi, ho hmo Hiri Motu, hr hrv Croatian, ht hat Haitian, hu hun Hungarian, hy arm hye
Armenian, hz her Herero, ia ina Interlingua, id ind Indonesian, ie ile Interlingue, ig ibo Igbo,
ii iii Sichuan Yi, ik ipk Inupiaq, io ido Ido, is ice isl Icelandic, it ita Italian, iu iku
Inuktitut, ja jpn Japanese, jv jav Javanese, ka geo kat Georgian, kg kon Kongo, ki kik Kikuyu,
kj kua Kuanyama, kk kaz Kazakh, kl kal Kalaallisut, km khm Central Khmer, kn kan Kannada, ko kor
Korean, kr kau Kanuri, ks kas Kashmiri, ku kur Kurdish, kv kom Komi, kw cor Cornish, ky kir
Kirghiz, la lat Latin, lb ltz Luxembourgish, lg lug Ganda, li lim Limburgan, ln lin Lingala, lo
lao Lao, lt lit Lithuanian, lu lub Luba-Katanga, lv lav Latvian, mg mlg Malagasy, mh mah
Marshallese, mi mao mri Maori, mk mac mkd Macedonian, ml mal Malayalam, mn mon Mongolian, mr mar
Marathi, ms may msa Malay, mt mlt Maltese, my bur mya Burmese, na nau Nauru, nb nob Bokmål, nd
nde Ndebele, ne nep Nepali, ng ndo Ndonga, nl dut nld Dutch, nn nno Norwegian Nynorsk, no nor
Norwegian, nr nbl Ndebele, nv nav Navajo, ny nya Chichewa, oc oci Occitan, oj oji Ojibwa, om orm
Oromo, or ori Oriya, os oss Ossetian, pa pan Panjabi, pi pli Pali, pl pol Polish, ps pus Pushto,
pt por Portuguese, qu que Quechua, rm roh Romansh, rn run Rundi, ro ron rum Romanian, ru rus
Russian, rw kin Kinyarwanda, sa san Sanskrit, sc srd Sardinian, sd snd Sindhi, se sme Northern
Sami, sg sag Sango, si sin Sinhala, sk slk slo Slovak, sl slv Slovenian, sm smo Samoan, sn sna
Shona, so som Somali, sq alb sqi Albanian, sr srp Serbian, ss ssw Swati, st sot Sotho, su sun
Sundanese, sv swe Swedish, sw swa Swahili, ta tam Tamil, te tel Telugu, tg tgk Tajik, th tha
Thai, ti tir Tigrinya, tk tuk Turkmen, tl tgl Tagalog, tn tsn Tswana, to ton Tonga, tr tur
Turkish, ts tso Tsonga, tt tat Tatar, tw twi Twi, ty tah Tahitian, ug uig Uighur, uk ukr
Ukrainian, ur urd Urdu, uz uzb Uzbek, ve ven Venda, vi vie Vietnamese, vo vol Volapük, wa wln
Walloon, wo wol Wolof, xh xho Xhosa, yi yid Yiddish, yo yor Yoruba, za zha Zhuang, zh chi zho
Chinese, zu zul Zulu
"""
ENTRIES = re.findall(r"(\w\w)((?: [a-z]{3})+) ([^,]+?)\s*(?:,|$)", " ".join(ISO_639.split()))
NAMES = {code: name for code, _, name in ENTRIES}
# The names and three-letter forms, in lower case -> the code.
CODES = {name.lower(): code for code, name in NAMES.items()}
CODES |= {form: code for code, forms, _ in ENTRIES for form in forms.split()}
CODES |= {"deutsch": "de", "español": "es", "français": "fr", "italiano": "it", "nederlands": "nl"}
CODES |= {"polski": "pl", "português": "pt", "русский": "ru", "türkçe": "tr", "chinese": "zh"}


def check_language(field: str, value: str) -> None:
    """Raises ValueError unless a value is an ISO 639-1 code.

    A language without such a code may have another one of three letters.
    """
    if value in NAMES or (re.fullmatch("[a-z]{3}", value) and value not in CODES):
        return
    asked = value.lower()
    base = re.split("[-_]", asked)[0]  # "de" of "de_DE"
    code = base if base in NAMES else CODES.get(asked)
    if not code:
        code = CODES[next(iter(difflib.get_close_matches(asked, CODES, 1)), "english")]
    raise ValueError(
        f"{field}={value!r}; expected an ISO 639-1 code, such as {code!r} ({NAMES[code]})"
    )
