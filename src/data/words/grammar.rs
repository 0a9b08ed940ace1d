//! English of generated texts: articles and numbers that fit the words that fill a template.
//!
//! A template is written for one thing (`there is a {target}`). [`article`] chooses `a` or `an` by the sound of the next
//! word. [`Number::rewrite`] changes a template for several things (`there are {target}`) and for what is not counted
//! (`there is {target}`).

/// `a` or `an` before `words`, by the first sound: `an effusion`, `a ureter`, `an MRI lesion`, `a US image`, `an 8 mm nodule`.
pub fn article(words: &str) -> &'static str {
    if starts_with_vowel_sound(words) { "an" } else { "a" }
}

fn starts_with_vowel_sound(words: &str) -> bool {
    let words = words.trim_start_matches(|c: char| !c.is_alphanumeric());
    let first: String = words.chars().take_while(|c| c.is_alphanumeric()).collect();
    let Some(letter) = first.chars().next() else { return false };
    if letter.is_ascii_digit() {
        return number_starts_with_vowel(&first);
    }
    if is_spelled(&first, words) {
        return "AEFHILMNORSX".contains(letter.to_ascii_uppercase());
    }
    let word = first.to_lowercase();
    let starts = |list: &[&str]| list.iter().any(|start| word.starts_with(start));
    if starts(&SILENT_H) {
        return true;
    }
    // `unimportant` and `uninvolved`, but `unilateral`
    if starts(&YOU) && !starts(&["unin", "unim", "uniden"]) || word == "unimodal" || starts(&["ewe"]) {
        return false;
    }
    if word == "one" || word == "once" {
        return false;
    }
    let vowels = "aeiouæœ\u{e0}\u{e1}\u{e2}\u{e3}\u{e4}\u{e5}\u{e8}\u{e9}\u{ea}\u{eb}\u{ed}\u{ee}\u{ef}\u{f3}\u{f4}\u{f6}\u{f8}\u{fa}\u{fb}\u{fc}";
    word.starts_with(|c: char| vowels.contains(c)) || starts(&["ytt"])
}

/// Words whose `h` is silent.
const SILENT_H: [&str; 5] = ["hour", "honest", "honor", "honour", "heir"];
/// Beginnings that sound like `you`.
const YOU: [&str; 18] = [
    "eu", "ubi", "uni", "ura", "ure", "uri", "uro", "usa", "use", "usi", "usu", "ute", "uti", "utr", "uve", "uvi",
    "uvu", "ukr",
];

/// Whether a number begins with a vowel: eight, eleven, eighteen, and those with such a beginning (8 to 8.9, 80, 11,000).
fn number_starts_with_vowel(word: &str) -> bool {
    let digits: String = word.chars().take_while(char::is_ascii_digit).collect();
    let leads = digits.starts_with("11") || digits.starts_with("18");
    digits.starts_with('8') || (leads && digits.len() % 3 == 2)
}

/// Short words that are often written in capitals and read as words.
const READ_AS_WORDS: [&str; 34] = [
    "FACE", "FAT", "FOOT", "HAND", "HEAD", "HIP", "HUMP", "LEG", "LENS", "LIMB", "LIP", "LOBE", "LUMP", "LUNG",
    "LYMPH", "MASS", "MOLE", "NAIL", "NECK", "NEST", "NET", "NEVI", "NODE", "NOSE", "RASH", "RIB", "RIM", "ROOT",
    "SAC", "SCAR", "SHAM", "SKIN", "STIR", "SINUS",
];

/// Whether the letters of the first word are read one by one: `MRI`, `X` of `X-ray`, `NSCLC`. `words` are all words: where
/// several long words are in capitals, they are read as words.
fn is_spelled(first: &str, words: &str) -> bool {
    // plural of an abbreviation: `MRIs`
    let stem = first.strip_suffix('s').filter(|stem| stem.len() > 1).unwrap_or(first);
    let letters: Vec<char> = stem.chars().filter(|c| c.is_alphabetic()).collect();
    if letters.len() == 1 {
        // the word `a` has no article before it
        return true;
    }
    if !letters.iter().all(char::is_ascii_uppercase) {
        return false;
    }
    let has_vowel = letters.iter().any(|c| "AEIOUY".contains(*c));
    let others = words[first.len()..].split_whitespace();
    let all_capitals = others.clone().any(|word| word.len() > 3)
        && others.flat_map(str::chars).filter(|c| c.is_alphabetic()).all(|c| c.is_ascii_uppercase());
    !has_vowel || (letters.len() <= 4 && !READ_AS_WORDS.contains(&stem) && !all_capitals)
}

/// Grammatical number of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Number {
    /// One thing: `a polyp`.
    One,
    /// Several: `polyps`, `vertebrae`.
    Several,
    /// What is not counted: `free fluid`, `ascites`.
    Mass,
}

/// Plurals without a final `s`, and plurals whose ending looks like a singular.
const PLURALS: [&str; 38] = [
    "alveoli", "bacteria", "bronchi", "calculi", "carcinomata", "cilia", "data", "diverticula", "emboli", "fasciculi",
    "feet", "foci", "foramina", "fungi", "ganglia", "glomeruli", "gyri", "haustra", "hili", "infiltrates", "loci",
    "lumina", "menisci", "myomata", "nevi", "naevi", "nuclei", "ostia", "ova", "septa", "stomata", "sulci", "teeth",
    "thrombi", "tubuli", "uteri", "villi", "viscera",
];
/// Singulars that end in `s` and have none of the endings of [`Number::of`].
const SINGULARS: [&str; 14] = [
    "atlas", "biceps", "bias", "canvas", "diabetes", "herpes", "lens", "mons", "pancreas", "pes", "pons", "quadriceps",
    "triceps", "vas",
];
/// Words that are not counted.
const MASSES: [&str; 17] = [
    "air", "ascites", "bile", "blood", "cartilage", "caries", "csf", "fat", "fluid", "gas", "marrow", "matter",
    "mucus", "pus", "tissue", "urine", "water",
];

impl Number {
    /// The number of a target, by its last word before `of`, `in` or `with`: `ground glass opacities` are several,
    /// `metastasis of the liver` is one.
    pub fn of(target: &str) -> Self {
        let lower = target.to_lowercase();
        let words =
            lower.split_whitespace().take_while(|word| !["of", "in", "with", "on", "at", "from"].contains(word));
        let head = words.last().unwrap_or_default().trim_matches(|c: char| !c.is_alphanumeric());
        // the last part of `X-rays`
        let head = head.rsplit('-').next().unwrap_or(head);
        if MASSES.contains(&head) {
            return Self::Mass;
        }
        let joined = lower.contains(" and ");
        let ends_like_one = head.ends_with("ss") || head.ends_with("us") || head.ends_with("is");
        let ends_like_several = head.len() > 2 && (head.ends_with('s') && !ends_like_one || head.ends_with("ae"));
        if joined || PLURALS.contains(&head) || (ends_like_several && !SINGULARS.contains(&head)) {
            Self::Several
        } else {
            Self::One
        }
    }

    /// A template about one `{target}` for this number. Only the usual forms are changed: `a {target}`, `is the {target}`,
    /// `{target} is`, `there is`, `{target} lies`, `its position`, `It is`, `It consists`.
    pub fn rewrite(self, template: &str) -> String {
        let mut text = template.to_owned();
        if self == Self::One {
            return text;
        }
        for before in ["", "{which} "] {
            for article in ["a ", "an "] {
                text = text.replace(&format!(" {article}{before}{{target}}"), &format!(" {before}{{target}}"));
            }
        }
        if self == Self::Mass {
            return text;
        }
        for (from, to) in [
            (" is the {target}", " are the {target}"),
            (" is the {which} {target}", " are the {which} {target}"),
            ("here is {target}", "here are {target}"),
            ("here is {which} {target}", "here are {which} {target}"),
            ("here is no {target}", "here are no {target}"),
            (" is there {target}", " are there {target}"),
            ("{target} is ", "{target} are "),
            ("{target} lies ", "{target} lie "),
            ("{target} appears ", "{target} appear "),
            (" its position", " their position"),
            (" its location", " their location"),
        ] {
            text = text.replace(from, to);
        }
        let begins = [
            ("Is there ", "Are there "),
            ("It is ", "They are "),
            ("It consists ", "They consist "),
            ("It lies ", "They lie "),
        ];
        for (from, to) in begins {
            if let Some(rest) = text.strip_prefix(from) {
                text = format!("{to}{rest}");
            }
        }
        text
    }
}

/// A target without an article of its own and without a final full stop: `the liver.` is `liver`.
pub fn without_article(target: &str) -> &str {
    let target = target.trim().trim_end_matches(['.', ',', ';', ':']);
    let lower = target.to_lowercase();
    for article in ["the ", "an ", "a "] {
        // `A` may be a name, as in `A lines`
        if lower.starts_with(article) && (article != "a " || target.starts_with("a ")) {
            return target[article.len()..].trim_start();
        }
    }
    target
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn articles_follow_the_sound() {
        let an = "effusion; ulcer; aneurysm; abscess; opacity; oedema; \u{153}dema; Effusion; ULCER; umbilical hernia; \
                   ulna; urticaria; hour-glass stenosis; heirloom; MRI lesion; MRIs; X-ray; x-ray image; ECG; HCC; NSCLC; \
                   RCC; FDG-PET lesion; S-shaped curve; 8 mm nodule; 8.5 mm cyst; 11 mm polyp; 18-gauge needle; 80 % \
                   stenosis; 11,000 cell cluster; uninvolved node; unimportant finding; unidentified mass; SOL; (infected) \
                   cyst; \u{e9}coul\u{e9}e; echogenic focus; ovary; F-shaped scar; LV; AVM; OPACITY; INFILTRATE";
        let a = "lesion; polyp; ureter; urethra; urinary bladder; uterus; uterine fibroid; uvula; uveal melanoma; \
                   unilateral mass; unit; unique lesion; user; usual finding; European hornet sting; eustachian tube; \
                   one-sided lesion; once treated lesion; hernia; haemorrhage; histiocytoma; US image; CT slice; T1 lesion; \
                   PET lesion; U-shaped scar; Lesion; LUNG MASS; MASS; NODE; SKIN LESION; FLAIR lesion; STIR lesion; 1 mm \
                   nodule; 7 mm nodule; 110 mm mass; 1100 mm mass; 180 degree turn; 0.8 mm cyst; yellow spot; unimodal \
                   pattern; BCC; DCIS; ground glass opacity";
        for (article, all) in [("an", an), ("a", a)] {
            for words in all.split("; ") {
                assert_eq!(super::article(words), article, "{words}");
            }
        }
    }

    #[test]
    fn plurals_and_masses_are_recognised() {
        for target in [
            "polyps",
            "lungs",
            "kidneys",
            "vertebrae",
            "metastases",
            "ground glass opacities",
            "lymph nodes",
            "teeth",
            "nuclei",
            "liver and spleen",
            "polyps of the colon",
            "B-lines",
            "thrombi",
            "bullae",
            "Kidneys",
            "MRI lesions",
            "infiltrates",
        ] {
            assert_eq!(Number::of(target), Number::Several, "{target}");
        }
        for target in [
            "lesion",
            "pancreas",
            "uterus",
            "abscess",
            "stenosis",
            "metastasis",
            "pelvis",
            "thrombus",
            "mass",
            "lens",
            "iris",
            "hydrocephalus",
            "pneumothorax",
            "abscess in the lungs",
            "cyst of both kidneys",
            "optic disc",
            "plexus",
            "virus",
            "nevus",
            "biceps",
            "aorta",
            "x",
            "",
        ] {
            assert_eq!(Number::of(target), Number::One, "{target}");
        }
        for target in ["ascites", "free fluid", "white matter", "soft tissue", "CSF", "caries"] {
            assert_eq!(Number::of(target), Number::Mass, "{target}");
        }
    }

    #[test]
    fn a_target_loses_its_own_article() {
        for (target, expected) in [
            ("the liver", "liver"),
            ("A polyp", "A polyp"),
            ("a polyp.", "polyp"),
            ("An ulcer", "ulcer"),
            ("theca cyst", "theca cyst"),
        ] {
            assert_eq!(without_article(target), expected);
        }
    }
}
