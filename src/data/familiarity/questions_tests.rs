use super::*;
use crate::manifest::{Manifest, Row, Split};
use crate::phantom::{PhantomOptions, generate};
use crate::templates::{Templates, Words};
use prsmed_base::event::Silent;

/// Questions that a model of lesion positions cannot answer.
const OTHERS: [&str; 48] = [
    "Is it malignant?",
    "Is this lesion cancer?",
    "Is the lesion benign or malignant?",
    "What is the diagnosis?",
    "What is the stage of the tumour?",
    "Is this melanoma?",
    "How long does the patient have to live?",
    "Which treatment do you recommend?",
    "Should I take antibiotics?",
    "Does the patient need surgery?",
    "What dose of the drug should be given?",
    "Where is the kidney stone?",
    "Where is the kidney in this image?",
    "Where is the fracture in this image?",
    "Segment the pancreas and describe its position.",
    "Can you find the aneurysm in this image?",
    "Which part of this image shows the pneumothorax?",
    "Where is the left lung nodule in this image?",
    "Segment the brighter gallstone and describe its position.",
    "Wo ist die Läsion in diesem Bild?",
    "Ist der Tumor bösartig?",
    "¿Dónde está la lesión en esta imagen?",
    "Où se trouve la lésion dans cette image ?",
    "Dov'è la lesione?",
    "Onde está a lesão?",
    "病变在哪里？",
    "这是恶性的吗？",
    "病変はどこですか。",
    "Где находится опухоль?",
    "أين الآفة؟",
    "Gdzie jest zmiana?",
    "What is the capital of France?",
    "Hello, how are you?",
    "Tell me a joke.",
    "Who are you?",
    "Write a poem about the sea.",
    "What time is it?",
    "What is the age of the patient?",
    "Is this patient male or female?",
    "How many lesions are there?",
    "What is the size of the lesion in millimetres?",
    "Is there a lesion in this image?",
    "Is this image normal?",
    "What modality is this image?",
    "Has the lesion grown since the last scan?",
    "asdf qwer",
    "???",
    "🙂",
];

/// Probability that an unlike question is further away than a known one.
fn auroc(known: &KnownQuestions, likes: &[String]) -> f64 {
    let distance = |question: &str| known.compare(question).question_distance.expect("a distance");
    let likes: Vec<f64> = likes.iter().map(|question| distance(question)).collect();
    let wins = |other: &&str| {
        let other = distance(other);
        likes
            .iter()
            .map(|like| if other > *like { 1.0 } else { 0.5 * f64::from(u8::from(other >= *like)) })
            .sum::<f64>()
    };
    OTHERS.iter().map(wins).sum::<f64>() / (OTHERS.len() * likes.len()) as f64
}

fn known(trained: &[String], validated: &[String]) -> KnownQuestions {
    KnownQuestions::new(trained.iter().map(String::as_str), validated.iter().map(String::as_str))
}

/// Every question of the templates about each target: every third one for validation, the others for training.
fn of_targets(targets: &[(&str, &str)]) -> (Vec<String>, Vec<String>) {
    let templates = Templates::embedded();
    let mut all = Vec::new();
    for (target, image) in targets {
        let words = Words { target, image, ..Words::default() };
        all.extend(templates.one.iter().map(|template| words.fill(&template.question)));
        for which in ["left", "right", "upper", "lower", "brighter", "larger"] {
            let words = Words { which, ..words };
            all.extend(templates.pair.iter().map(|template| words.fill(&template.question)));
        }
    }
    let part = |is_validated: bool| -> Vec<String> {
        let numbered = all.iter().enumerate().filter(|(number, _)| (number % 3 == 1) == is_validated);
        numbered.map(|(_, text)| text.clone()).collect()
    };
    (part(false), part(true))
}

#[test]
fn validation_questions_of_phantoms_are_told_from_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("phantoms");
    let options =
        PhantomOptions { count: 60, image_size_px: 64, val_frac: 0.3, test_frac: 0.1, ..PhantomOptions::default() };
    generate(&root, &options, &Silent).expect("phantoms");
    let manifest = Manifest::open(&root, None).expect("rows");
    let of = |split: Split| -> Vec<String> {
        manifest.rows_of(split).into_iter().map(|row| manifest.rows[row].question.clone()).collect()
    };
    let (trained, validated, tested) = (of(Split::Train), of(Split::Val), of(Split::Test));
    let known = known(&trained, &validated);
    for likes in [&validated, &tested] {
        let area = auroc(&known, likes);
        assert!(area >= 0.95, "{area}");
    }
    for question in OTHERS {
        let found = known.compare(question);
        assert_eq!(found.question_known, Some(false), "{question}: {found:?}");
    }
    let passed = validated.iter().filter(|question| known.compare(question).question_known == Some(true)).count();
    assert!(passed * 100 >= validated.len() * 95, "{passed} of {}", validated.len());
}

/// Checkpoints of a run are the same in every process, to the last bit of the limits.
#[test]
fn limits_do_not_depend_on_the_order_of_a_table() {
    let (trained, validated) = of_targets(&[("skin lesion", "photo"), ("liver", "CT slice"), ("polyp", "image")]);
    let all: BTreeSet<String> = (0..20).map(|_| known(&trained, &validated).to_json()).collect();
    assert_eq!(all.len(), 1, "{all:?}");
    let known = known(&trained, &validated);
    let lengths: BTreeSet<Vec<u64>> = (0..20)
        .map(|_| KnownQuestions::of(known.saved.clone()).lengths.iter().map(|length| length.to_bits()).collect())
        .collect();
    assert_eq!(lengths.len(), 1);
}

#[test]
fn shorter_forms_of_training_questions_are_known() {
    let trained = [
        "Where is the skin lesion in this dermoscopic image?",
        "Segment the skin lesion in this dermoscopic image and describe its position.",
        "Which part of this dermoscopic image shows the skin lesion?",
    ];
    let known = KnownQuestions::new(trained, trained);
    let is_known = |question: &str| known.compare(question).question_known;
    for question in
        ["Where is the lesion?", "Where is the skin lesion?", "where is the lesion in this image", trained[1]]
    {
        assert_eq!(is_known(question), Some(true), "{question}");
    }
    for question in ["Where?", "Where is the mole?", "Is it a lesion or not?", "Where is this image?", "Where is this?"]
    {
        assert_eq!(is_known(question), Some(false), "{question}");
    }
    let long = "Where is the liver tumour in this contrast-enhanced abdominal CT slice of the portal venous phase?";
    let tumours = KnownQuestions::new([long], [long]);
    assert_eq!(tumours.compare("Where is the tumour?").question_known, Some(true));
    assert_eq!(tumours.compare("Where is the liver?").question_known, Some(false));
}

#[test]
fn unseen_combinations_of_known_words_are_told_from_others() {
    let one = [("lesion", "image")];
    let many = [("skin lesion", "photo"), ("liver", "CT slice"), ("spleen", "CT slice"), ("polyp", "endoscopic image")];
    for targets in [&one[..], &many[..]] {
        let (trained, validated) = of_targets(targets);
        let known = known(&trained, &validated);
        let area = auroc(&known, &validated);
        assert!(area >= 0.95, "{targets:?}: {area}");
        let missed: Vec<&str> =
            OTHERS.into_iter().filter(|other| known.compare(other).question_known != Some(false)).collect();
        assert!(missed.len() <= 2, "{targets:?}: {missed:?}");
    }
}

#[test]
fn a_target_that_never_occurred_is_unlike_in_any_style() {
    let (trained, validated) = of_targets(&[("liver", "CT slice"), ("left kidney", "CT slice")]);
    let known = known(&trained, &validated);
    for template in &Templates::embedded().one {
        for (target, is_known) in [("liver", true), ("kidney stone", false), ("aorta", false), ("Milz", false)] {
            let question = Words { target, image: "CT slice", ..Words::default() }.fill(&template.question);
            let found = known.compare(&question);
            assert_eq!(found.question_known, Some(is_known), "{question}: {found:?}");
            let warning = found.warnings().next();
            assert_eq!(warning.is_none(), is_known, "{warning:?}");
            let names = |warning: String| warning.contains(target.rsplit(' ').next().unwrap_or_default());
            assert!(warning.is_none_or(|text| names(text.to_lowercase()) || target == "Milz"), "{question}");
        }
    }
}

#[test]
fn case_punctuation_and_left_out_words_do_not_make_a_question_unlike() {
    let (trained, validated) = of_targets(&[("lesion", "image")]);
    let known = known(&trained, &validated);
    for question in ["WHERE IS THE LESION IN THIS IMAGE", " where is the lesion... ", "Where is the left lesion?"] {
        assert_eq!(known.compare(question).question_known, Some(true), "{question}");
    }
    let same = known.compare("where is the lesion in this image");
    assert!(same.question_distance.expect("a distance") < 1e-9, "{same:?}");
    assert_eq!(same.nearest_question.as_deref(), Some("Where is the lesion in this image?"));
    let other = known.compare("Where is the stone of the kidney?");
    assert_eq!(other.new_words, ["kidney", "stone"]);
    let text = other.warnings().next().expect("unlike");
    assert!(text.contains("no training question has: kidney, stone") && text.contains("`Where is the"), "{text}");
}

#[test]
fn nothing_is_claimed_without_validation_questions_or_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    assert_eq!(KnownQuestions::open(folder.path()).expect("no file"), None);
    assert_eq!((Familiarity::default().question_known, Familiarity::default().warnings().next()), (None, None));
    let without = KnownQuestions::new(["Where is it?"], []);
    let found = without.compare("Who are you?");
    assert_eq!((found.question_known, found.nearest_question.as_deref()), (None, Some("Where is it?")));
    assert_eq!(found.warnings().next(), None);
    let empty = KnownQuestions::new([], ["Where?"]);
    assert_eq!(empty.compare("Where?").question_known, None);
}

#[test]
fn a_file_has_the_same_content_again_and_a_damaged_one_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (trained, validated) = of_targets(&[("lesion", "image"), ("cup", "fundus image")]);
    let known = known(&trained, &validated);
    let path = folder.path().join(QUESTIONS_FILE);
    std::fs::write(&path, known.to_json()).expect("a file");
    let again = KnownQuestions::open(folder.path()).expect("readable").expect("a file");
    assert_eq!(again.saved, known.saved);
    for question in OTHERS {
        let (again, known) = (again.compare(question), known.compare(question));
        assert_eq!((again.question_known, again.new_words), (known.question_known, known.new_words), "{question}");
    }
    std::fs::write(&path, "{").expect("a file");
    let error = KnownQuestions::open(folder.path()).expect_err("damaged");
    assert!(error.to_string().contains(QUESTIONS_FILE) && !error.hint().is_empty(), "{error}");
}

#[test]
fn the_most_frequent_questions_are_the_examples() {
    let rows = ["b?", "a?", "c?", "c?", "b?", "c?"];
    assert_eq!(KnownQuestions::new(rows, []).examples(2), ["c?", "b?"]);
}

#[test]
fn limits_come_from_the_validation_questions_within_bounds() {
    let limits = |validated: &[&str]| {
        let trained = ["where is the lesion", "where is the left lesion", "show the lesion"];
        KnownQuestions::new(trained, validated.iter().copied()).saved.limits.expect("limits")
    };
    let strict = limits(&["where is the lesion"]);
    assert_eq!((strict.distance, strict.new_words, strict.num_validated), (DISTANCES[0], 0.0, 1));
    let wide = limits(&["entirely other words", "nothing in common"]);
    assert_eq!((wide.distance, wide.new_words, wide.num_validated), (DISTANCES[1], MOST_NEW, 2));
    let between = limits(&["where is the lesion", "show the left lesion", "where is the right lesion"]);
    assert!(between.distance > DISTANCES[0] && between.new_words > 0.0, "{between:?}");
}

#[test]
fn a_question_of_another_class_is_not_known_for_an_image() {
    let trained = ["Where is the polyp?", "Where is the nevus?", "Where is the lesion?", "Where is the lesion?"];
    let classes = ["colon", "skin", "skin", "colon"];
    let known = KnownQuestions::new(trained, trained).with_classes(trained.into_iter().zip(classes));
    let known: KnownQuestions = KnownQuestions::of(serde_json::from_str(&known.to_json()).expect("its own file"));
    let beside = |question: &str, class: &str, sure: f32| known.compare(question).beside(Some((class, sure)));
    let other = beside("where is the polyp", "skin", 0.99);
    assert_eq!((other.question_known, &other.question_classes[..]), (Some(false), &["colon".to_owned()][..]));
    assert!(other.warnings().next().expect("a warning").contains("about colon only"), "{other:?}");
    assert_eq!(beside("Where is the polyp?", "colon", 0.99).question_known, Some(true));
    assert_eq!(beside("Where is the polyp?", "skin", 0.5).question_known, Some(true), "the class is not sure");
    assert_eq!(beside("Where is the lesion?", "skin", 0.99).question_known, Some(true), "asked about both");
    assert_eq!(known.compare("Where is the polyp?").beside(None).question_known, Some(true));
    let old = KnownQuestions::new(trained, trained);
    assert_eq!(old.compare("Where is the polyp?").beside(Some(("skin", 1.0))).question_known, Some(true));
}

#[test]
fn a_word_that_names_the_target_of_other_classes_tells_in_any_sentence() {
    let ask = |target: &str| {
        [
            format!("Where is the {target} in this image?"),
            format!("Can you find the {target} in this image?"),
            format!("Segment the {target} and describe its position."),
        ]
    };
    let of_class = |class: &'static str, targets: &[&str]| -> Vec<(String, &'static str)> {
        let questions: Vec<String> = targets.iter().flat_map(|target| ask(target)).collect();
        questions.iter().cycle().take(12).map(|question| (question.clone(), class)).collect()
    };
    let mut rows = of_class("skin", &["skin lesion"]);
    rows.extend(of_class("colon", &["polyp"]));
    rows.extend(of_class("breast", &["breast tumour"]));
    rows.extend(of_class("ct", &["liver", "spleen"]));
    // a template that one class has by chance
    rows.push(("Is there a polyp visible in this image?".into(), "colon"));
    let questions = || rows.iter().map(|(question, _)| question.as_str());
    let known = KnownQuestions::new(questions(), questions())
        .with_classes(rows.iter().map(|(question, class)| (question.as_str(), *class)));
    let about = |question: &str, class: &str| {
        let found = known.compare(question).beside(Some((class, 0.99)));
        (found.question_known, found.question_classes.join(" "))
    };
    for question in ["Where is the polyp?", "Find the polyp", "Can you find the polyp?", "Segment the polyp."] {
        assert_eq!(about(question, "skin"), (Some(false), "colon".to_owned()), "{question}");
        assert_eq!(about(question, "colon").0, Some(true), "{question}");
    }
    assert_eq!(about("Where is the breast tumour?", "skin"), (Some(false), "breast".to_owned()));
    for (question, class) in [
        ("Where is the skin lesion?", "skin"),
        ("Can you find the spleen in this image?", "ct"),
        ("Is the skin lesion visible in this image?", "skin"),
    ] {
        assert_eq!(about(question, class), (Some(true), String::new()), "{question}");
    }
    assert_eq!(known.compare("Is there any polyp in the image?").new_words, [""; 0]);
    let examples = known.examples(4).join(" ");
    assert!(["skin", "polyp", "breast"].iter().all(|class| examples.contains(class)), "{examples}");
    assert!(examples.contains("liver") || examples.contains("spleen"), "one about each class: {examples}");
    assert_eq!(known.examples(100).len(), known.saved.questions.len());
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_questions_of_real_images_belong_to_their_classes() {
    let rows = Manifest::open(&crate::fixture::shared("data/real"), None).unwrap().rows;
    let of = |split: Split| rows.iter().filter(move |row| row.split == split);
    let [trained, held_out] = [Split::Train, Split::Test].map(|split| of(split).map(|row| row.question.as_str()));
    let known = KnownQuestions::new(trained, held_out)
        .with_classes(of(Split::Train).map(|row| (row.question.as_str(), row.modality.as_str())));
    let others = |question: &str, class: &str| {
        known.compare(question).beside(Some((class, 0.99))).question_classes.iter().cloned().collect::<BTreeSet<_>>()
    };
    let wrong: Vec<&Row> = of(Split::Test).filter(|row| !others(&row.question, &row.modality).is_empty()).collect();
    assert!(wrong.is_empty(), "{} of {} questions: {wrong:?}", wrong.len(), of(Split::Test).count());
    let classes: BTreeSet<&str> = of(Split::Test).map(|row| row.modality.as_str()).collect();
    for class in classes {
        let expected = if class == "polyp_endoscopy" { "" } else { "polyp_endoscopy" };
        let found = others("Where is the polyp in this image?", class);
        assert_eq!(Vec::from_iter(found).join(" "), expected, "{class}");
    }
}
