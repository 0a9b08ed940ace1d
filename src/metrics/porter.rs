//! Porter stemmer with the extensions of Python's `nltk`, which Python's ROUGE and METEOR use.
//!
//! It is not the Snowball English stemmer. The two differ on 24 of the 1003 words in `tests/fixtures/text_scores.json`
//! (`this`, `plus`, `previous`, `generally`, ...), some of them words of real answers (`fundus`, `nevus`).
//!
//! Sources: Porter 1980, <https://www.tartarus.org/~martin/PorterStemmer/>, and `nltk.stem.porter` in its default mode.
//! Deviations: none known.

/// Words with an irregular stem, as `word>stem`.
const IRREGULAR: &str = "sky>sky skies>sky dying>die lying>lie tying>tie news>news innings>inning inning>inning \
    outings>outing outing>outing cannings>canning canning>canning howe>howe proceed>proceed exceed>exceed succeed>succeed";
/// Rules of step 2, as `suffix>replacement`.
const DOUBLE_SUFFIXES: &str = "ational>ate tional>tion enci>ence anci>ance izer>ize bli>ble alli>al entli>ent eli>e \
    ousli>ous ization>ize ation>ate ator>ate alism>al iveness>ive fulness>ful ousness>ous aliti>al iviti>ive biliti>ble \
    fulli>ful";
/// Rules of step 3.
const FULL_AND_NESS: &str = "icate>ic ative> alize>al iciti>ic ical>ic ful> ness>";
/// Rules of step 4 without `ion`.
const BARE_SUFFIXES: &str =
    "al> ance> ence> er> ic> able> ible> ant> ement> ment> ent> ou> ism> ate> iti> ous> ive> ize>";

/// The stem of a word, in lower case.
pub fn stem(word: &str) -> String {
    let word = word.to_lowercase();
    if let Some((_, stem)) = pairs(IRREGULAR).find(|(irregular, _)| *irregular == word) {
        return stem.to_owned();
    }
    if word.chars().count() <= 2 {
        return word;
    }
    let word = plural(word);
    let word = past_and_gerund(word);
    let word = final_y(word);
    let word = double_suffix(word);
    let word = first_that_fits(word, rules(FULL_AND_NESS, positive));
    let word = bare_suffix(word);
    final_l(final_e(word))
}

/// For each character, true if it is a consonant. `y` is a consonant unless it follows one.
fn consonants(word: &str) -> Vec<bool> {
    let mut flags: Vec<bool> = Vec::with_capacity(word.len());
    for c in word.chars() {
        flags.push(match c {
            'a' | 'e' | 'i' | 'o' | 'u' => false,
            'y' => flags.last().is_none_or(|consonant| !consonant),
            _ => true,
        });
    }
    flags
}

/// Porter's m: the number of vowel-consonant sequences.
fn measure(word: &str) -> usize {
    consonants(word).windows(2).filter(|pair| !pair[0] && pair[1]).count()
}

fn positive(word: &str) -> bool {
    measure(word) > 0
}

fn above_one(word: &str) -> bool {
    measure(word) > 1
}

fn has_vowel(word: &str) -> bool {
    consonants(word).contains(&false)
}

fn ends_in_double_consonant(word: &str) -> bool {
    let mut last = word.chars().rev();
    let (Some(a), Some(b)) = (last.next(), last.next()) else { return false };
    a == b && consonants(word).last() == Some(&true)
}

/// Porter's *o: consonant, vowel, consonant other than w, x, y; or just vowel, consonant.
fn ends_in_cvc(word: &str) -> bool {
    let flags = consonants(word);
    match flags[..] {
        [false, true] => true,
        [.., true, false, true] => !word.ends_with(['w', 'x', 'y']),
        _ => false,
    }
}

/// The pairs `left>right` of a list.
fn pairs(list: &'static str) -> impl Iterator<Item = (&'static str, &'static str)> {
    list.split_whitespace().filter_map(|pair| pair.split_once('>'))
}

/// A rule: suffix, replacement, and a condition on the part before the suffix.
type Rule = (&'static str, &'static str, fn(&str) -> bool);

/// Rules with the same condition.
fn rules(list: &'static str, holds: fn(&str) -> bool) -> impl Iterator<Item = Rule> {
    pairs(list).map(move |(suffix, replacement)| (suffix, replacement, holds))
}

/// Applies the first rule whose suffix matches. If its condition is false, no other rule is tried.
fn first_that_fits(word: String, rules: impl IntoIterator<Item = Rule>) -> String {
    for (suffix, replacement, holds) in rules {
        if let Some(start) = word.strip_suffix(suffix) {
            return if holds(start) { format!("{start}{replacement}") } else { word };
        }
    }
    word
}

/// Step 1a.
fn plural(word: String) -> String {
    if word.chars().count() == 4
        && let Some(start) = word.strip_suffix("ies")
    {
        return format!("{start}ie");
    }
    first_that_fits(word, rules("sses>ss ies>i ss>ss s>", |_| true))
}

/// Step 1b.
fn past_and_gerund(word: String) -> String {
    if let Some(start) = word.strip_suffix("ied") {
        return format!("{start}{}", if word.chars().count() == 4 { "ie" } else { "i" });
    }
    if let Some(start) = word.strip_suffix("eed") {
        return if positive(start) { format!("{start}ee") } else { word };
    }
    let bare = ["ed", "ing"].iter().filter_map(|suffix| word.strip_suffix(suffix)).find(|start| has_vowel(start));
    let Some(bare) = bare else { return word };
    if bare.ends_with("at") || bare.ends_with("bl") || bare.ends_with("iz") {
        return format!("{bare}e");
    }
    let mut bare = bare.to_owned();
    if ends_in_double_consonant(&bare) {
        if !bare.ends_with(['l', 's', 'z']) {
            bare.pop();
        }
    } else if measure(&bare) == 1 && ends_in_cvc(&bare) {
        bare.push('e');
    }
    bare
}

/// Step 1c in nltk's form: `y` after a consonant that is not the first letter.
fn final_y(word: String) -> String {
    let holds = |start: &str| start.chars().count() > 1 && consonants(start).last() == Some(&true);
    first_that_fits(word, rules("y>i", holds))
}

/// Step 2.
fn double_suffix(word: String) -> String {
    if let Some(start) = word.strip_suffix("alli")
        && positive(start)
    {
        return double_suffix(format!("{start}al"));
    }
    // the `l` counts as part of the stem, so that `geologi` and `archaeologi` are treated alike
    let logi: Rule = ("logi", "log", |start| positive(&format!("{start}l")));
    first_that_fits(word, rules(DOUBLE_SUFFIXES, positive).chain([logi]))
}

/// Step 4.
fn bare_suffix(word: String) -> String {
    let ion: Rule = ("ion", "", |start| above_one(start) && start.ends_with(['s', 't']));
    first_that_fits(word, rules(BARE_SUFFIXES, above_one).chain([ion]))
}

/// Step 5a.
fn final_e(word: String) -> String {
    match word.strip_suffix('e') {
        Some(start) if above_one(start) || measure(start) == 1 && !ends_in_cvc(start) => start.to_owned(),
        _ => word,
    }
}

/// Step 5b.
fn final_l(mut word: String) -> String {
    if word.ends_with("ll") && above_one(&word[..word.len() - 1]) {
        word.pop();
    }
    word
}

#[cfg(test)]
mod tests {
    use super::stem;

    #[test]
    fn examples_of_the_paper() {
        for (word, expected) in [
            ("caresses", "caress"),
            ("ponies", "poni"),
            ("cats", "cat"),
            ("feed", "feed"),
            ("agreed", "agre"),
            ("hopping", "hop"),
            ("falling", "fall"),
            ("filing", "file"),
            ("relational", "relat"),
            ("rational", "ration"),
            ("vietnamization", "vietnam"),
            ("electrical", "electr"),
            ("adoption", "adopt"),
            ("controlling", "control"),
            ("dies", "die"),
            ("enjoy", "enjoy"),
            ("Located", "locat"),
            ("troubled", "troubl"),
            ("blotted", "blot"),
        ] {
            assert_eq!(stem(word), expected, "{word}");
        }
    }

    #[test]
    fn unusual_input_is_unchanged() {
        for word in ["", "a", "ß", "14", "...", "ü-é"] {
            assert_eq!(stem(word), word);
        }
    }
}
