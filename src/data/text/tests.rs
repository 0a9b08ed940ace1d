use std::fs;

use serde_json::json;

use super::*;
use crate::fixture::{self, checkout};

fn shared(name: &str) -> PathBuf {
    fixture::shared("reference/oracle").join(name)
}

const BASE: &str = "base/llava-med-v1.5-mistral-7b";

const TEXTS: [&str; 22] = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "a",
    " a",
    "Where is the tumour located in this CT medical image?",
    "two  spaces   three    four     eight         end  ",
    "\n### User: What? \n### Assistant: \nThe lesion (BI-RADS 3).",
    "tabs\tand\r\nwindows lines",
    "Größe, café, naïve, tumour’s – “quoted”",
    "腫瘍は左上にあります。 Опухоль слева. الورم في اليسار",
    "🩻🧠 emoji 👩‍⚕️ with joiners 🇨🇭",
    "math ≤ ≥ ± µm² 10⁻³ ½",
    "0123456789 3.14159 1e-5 2024-05-17",
    "<s> literal </s> specials <unk> inside <image> text",
    "<0x0A> is not a newline",
    "▁already▁escaped ▁ mix",
    "CamelCaseWords_and_snake_case and UPPERCASE",
    "\u{0} control \u{7f} \u{feff} \u{200b} \u{a0}",
    "supercalifragilisticexpialidocious pneumonoultramicroscopicsilicovolcanoconiosis",
];

#[test]
#[ignore = "needs shared data"]
fn shared_data_the_converted_model_equals_the_fast_tokenizer() {
    let base = shared(BASE);
    let fast = TextTokenizer::open(&base, &Prompt::PUBLISHED).unwrap();
    let temp = tempfile::tempdir().unwrap();
    fs::copy(base.join("tokenizer.model"), temp.path().join("tokenizer.model")).unwrap();
    let converted = TextTokenizer::open(temp.path(), &Prompt::PUBLISHED).unwrap();
    assert_eq!(converted.vocab_size(), 32000);
    // The complete files are equal, not only the ids of these texts.
    let json = |tokenizer: &TextTokenizer| -> Value { serde_json::from_str(&tokenizer.files().unwrap()[0].1).unwrap() };
    let (fast_json, converted_json) = (json(&fast), json(&converted));
    assert_eq!(fast_json["model"]["merges"].as_array().unwrap().len(), 58980);
    assert!(fast_json == converted_json, "the files differ");
    for text in TEXTS {
        let ids = converted.encode(text).unwrap();
        assert_eq!(ids, fast.encode(text).unwrap(), "{text:?}");
        assert_eq!(converted.decode(&ids).unwrap(), fast.decode(&ids).unwrap());
    }
    assert_eq!(converted.decode(&converted.encode(TEXTS[13]).unwrap()).unwrap(), TEXTS[13]);
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_prompts_have_the_published_ids() {
    let base = shared(BASE);
    let tok = TextTokenizer::open(&base, &Prompt::PUBLISHED).unwrap();
    let prompt = training_prompt(&tok, "Where is it?", "Left.", false).unwrap();
    assert_eq!(prompt.ids[..7], [1, IMAGE_TOKEN, 28705, 13, 27332, 1247, 28747]);
    let header = [28705, 13, 27332, 21631, 28747, 28705, 13];
    assert_eq!(prompt.ids[prompt.answer_start - 7..prompt.answer_start], header);
    assert_eq!(tok.decode(&prompt.ids[prompt.answer_start..]).unwrap(), "Left.");
    let with_eos = training_prompt(&tok, "Where is it?", "Left.", true).unwrap();
    assert_eq!(with_eos.ids, [&prompt.ids[..], &[2]].concat());
    for answer in TEXTS {
        let question = question_prompt(&tok, answer).unwrap();
        let whole = training_prompt(&tok, answer, answer, false).unwrap();
        assert_eq!(question.answer_start, question.ids.len());
        assert!(whole.ids.starts_with(&question.ids), "{answer:?}");
    }
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_the_reference_data_set_has_the_reference_ids() {
    let (base, folder) = (shared(BASE), shared("preprocess"));
    let tok = TextTokenizer::open(&base, &Prompt::PUBLISHED).unwrap();
    let expected = fs::read(folder.join("expected.safetensors")).unwrap();
    let expected = safetensors::SafeTensors::deserialize(&expected).unwrap();
    let ids = |name: &str| -> Vec<i64> {
        let tensor = expected.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), safetensors::Dtype::I64);
        tensor.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
    };
    let mut compared = 0;
    for csv in ["a.csv", "b.csv"] {
        let mut reader = csv::Reader::from_path(folder.join("dataset/annotation").join(csv)).unwrap();
        for row in reader.records() {
            let row = row.unwrap();
            if row.iter().any(str::is_empty) || &row[4] != "train" {
                continue;
            }
            let class = row[0].split('/').next().unwrap();
            let prompt = training_prompt(&tok, &row[2], &row[3], false).unwrap();
            assert_eq!(prompt.ids, ids(&format!("{class}.text_ids")), "{class}");
            compared += 1;
        }
    }
    assert_eq!(compared, 6);
}

fn corpus() -> Vec<String> {
    let mut texts = Vec::new();
    for organ in ["brain", "breast", "lung", "polyp", "skin"] {
        for place in ["upper left", "center", "lower right"] {
            texts.push(format!("\n### User: Where is the {organ} lesion in this image? \n### Assistant: \n"));
            texts.push(format!("The {organ} lesion is located in the {place} of the image."));
        }
    }
    texts
}

fn trained() -> TextTokenizer {
    let corpus = corpus();
    TextTokenizer::train(&corpus.iter().map(String::as_str).collect::<Vec<_>>(), 512, &Prompt::PUBLISHED).unwrap()
}

#[test]
fn a_trained_tokenizer_encodes_words_as_single_pieces() {
    let tok = trained();
    assert!(tok.vocab_size() <= 512 && tok.vocab_size() > 259);
    assert_eq!((tok.bos(), tok.eos()), (Some(1), 2));
    // <s>, seven words, the full stop.
    assert_eq!(tok.encode("The brain lesion is located in the.").unwrap().len(), 1 + 7 + 1);
    let prompt = training_prompt(&tok, "Where is the lung lesion in this image?", "center", true).unwrap();
    assert_eq!(tok.decode(&prompt.ids[prompt.answer_start..]).unwrap(), "center");
    for text in TEXTS {
        let (question, whole) = (question_prompt(&tok, text), training_prompt(&tok, text, text, false));
        assert!(whole.unwrap().ids.starts_with(&question.unwrap().ids), "{text:?}");
    }
    for text in [TEXTS[8], TEXTS[9], TEXTS[12], TEXTS[13]] {
        assert_eq!(tok.decode(&tok.encode(text).unwrap()).unwrap(), text);
    }
    assert!(TextTokenizer::train(&["a"], 259, &Prompt::PUBLISHED).unwrap_err().to_string().contains("no room"));
}

#[test]
fn training_depends_on_the_texts_alone() {
    let (one, mut reversed) = (trained(), corpus());
    reversed.reverse();
    let other = TextTokenizer::train(&reversed.iter().map(String::as_str).collect::<Vec<_>>(), 512, &Prompt::PUBLISHED)
        .unwrap();
    assert_eq!(one.files().unwrap(), other.files().unwrap());
}

#[test]
fn a_saved_tokenizer_can_be_opened() {
    let (tok, temp) = (trained(), tempfile::tempdir().unwrap());
    tok.save(temp.path()).unwrap();
    let again = TextTokenizer::open(temp.path(), &Prompt::PUBLISHED).unwrap();
    assert_eq!(tok.files().unwrap(), again.files().unwrap());
    for text in TEXTS {
        assert_eq!(tok.encode(text).unwrap(), again.encode(text).unwrap());
    }
}

#[test]
#[ignore = "needs scripts/setup --checks"]
fn python_reads_a_saved_tokenizer_with_equal_results() {
    let python = checkout().join(".venv/bin/python");
    let (tok, temp) = (trained(), tempfile::tempdir().unwrap());
    tok.save(temp.path()).unwrap();
    let code = "import json, sys\nfrom transformers import AutoTokenizer\n\
                t = AutoTokenizer.from_pretrained(sys.argv[1])\n\
                print(json.dumps([t(x).input_ids for x in json.loads(sys.argv[2])]))";
    let texts: Vec<&str> = TEXTS.into_iter().filter(|text| !text.contains('\0')).collect();
    let output = std::process::Command::new(python)
        .args(["-c", code])
        .arg(temp.path())
        .arg(serde_json::to_string(&texts).unwrap())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let ids: Vec<Vec<i64>> = serde_json::from_slice(&output.stdout).unwrap();
    let ours: Vec<Vec<i64>> = texts.iter().map(|text| tok.encode(text).unwrap()).collect();
    assert_eq!(ids, ours);
}

#[test]
fn truncation_and_padding_of_a_file_are_ignored() {
    let (tok, temp) = (trained(), tempfile::tempdir().unwrap());
    tok.save(temp.path()).unwrap();
    let file = temp.path().join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    json["truncation"] = json!({ "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0 });
    json["padding"] = json!({
        "strategy": { "Fixed": 64 }, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 2, "pad_type_id": 0, "pad_token": "</s>",
    });
    fs::write(&file, json.to_string()).unwrap();
    let again = TextTokenizer::open(temp.path(), &Prompt::PUBLISHED).unwrap();
    for text in TEXTS {
        assert_eq!(again.encode(text).unwrap(), tok.encode(text).unwrap(), "{text:?}");
    }
}

#[test]
fn a_tokenizer_that_drops_merges_at_random_is_an_error() {
    let (tok, temp) = (trained(), tempfile::tempdir().unwrap());
    let mut json: Value = serde_json::from_str(&tok.files().unwrap()[0].1).unwrap();
    let mut open = |dropout: f64| {
        json["model"]["dropout"] = json!(dropout);
        fs::write(temp.path().join("tokenizer.json"), json.to_string()).unwrap();
        TextTokenizer::open(temp.path(), &Prompt::PUBLISHED)
    };
    assert_eq!(open(0.0).unwrap().encode(TEXTS[7]).unwrap(), tok.encode(TEXTS[7]).unwrap());
    for dropout in [0.1, 1.0] {
        let error = open(dropout).unwrap_err().to_string();
        assert!(error.contains("drops merges at random (`dropout`)"), "{error}");
    }
}

#[test]
fn a_template_with_unknown_tokens_or_texts_is_an_error() {
    let (tok, temp) = (trained(), tempfile::tempdir().unwrap());
    let mut json: Value = serde_json::from_str(&tok.files().unwrap()[0].1).unwrap();
    let mut open = |token: &str, text: &str| {
        let single = json!([{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": text, "type_id": 0}}]);
        let tokens = json!({"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}});
        json["post_processor"] =
            json!({"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens});
        fs::write(temp.path().join("tokenizer.json"), json.to_string()).unwrap();
        TextTokenizer::open(temp.path(), &Prompt::PUBLISHED).map_err(|error| error.to_string())
    };
    assert!(open("<s>", "A").is_ok());
    let error = open("<->", "A").unwrap_err();
    assert!(error.contains("has the token `<->` in its template, but not in `special_tokens`"), "{error}");
    let error = open("<s>", "B").unwrap_err();
    assert!(error.contains("has the text `B` in its template of one text"), "{error}");
}

#[test]
fn a_decoder_that_strips_the_end_of_tokens_is_an_error() {
    let (tok, temp) = (trained(), tempfile::tempdir().unwrap());
    let mut json: Value = serde_json::from_str(&tok.files().unwrap()[0].1).unwrap();
    let mut open = |stop: u64| {
        json["decoder"] = json!({"type": "Strip", "content": " ", "start": 1, "stop": stop});
        fs::write(temp.path().join("tokenizer.json"), json.to_string()).unwrap();
        TextTokenizer::open(temp.path(), &Prompt::PUBLISHED).map_err(|error| error.to_string())
    };
    assert!(open(0).is_ok());
    let error = open(5).unwrap_err();
    assert!(error.contains("strips characters from the end of tokens (`stop` of the decoder)"), "{error}");
}

#[test]
fn missing_and_damaged_tokenizers_are_errors() {
    let temp = tempfile::tempdir().unwrap();
    let error = TextTokenizer::open(temp.path(), &Prompt::PUBLISHED).unwrap_err();
    assert!(error.to_string().contains("neither `tokenizer.json` nor `tokenizer.model`"), "{error}");
    fs::write(temp.path().join("tokenizer.model"), "nonsense").unwrap();
    let error = TextTokenizer::open(temp.path(), &Prompt::PUBLISHED).unwrap_err();
    assert!(error.to_string().contains("tokenizer.model"), "{error}");
    fs::write(temp.path().join("tokenizer.json"), "{}").unwrap();
    assert!(TextTokenizer::open(temp.path(), &Prompt::PUBLISHED).unwrap_err().to_string().contains("tokenizer.json"));
    // A tokenizer that adds no `<s>`.
    let mut json: Value = serde_json::from_str(&trained().files().unwrap()[0].1).unwrap();
    json["post_processor"] = Value::Null;
    fs::write(temp.path().join("tokenizer.json"), json.to_string()).unwrap();
    let error = TextTokenizer::open(temp.path(), &Prompt::PUBLISHED).unwrap_err();
    assert!(error.to_string().contains("does not put `<s>`"), "{error}");
}

#[test]
fn a_streamed_answer_is_the_answer() {
    let tok = trained();
    let text = "The lung lesion 🩻 is there.";
    let ids = tok.encode(text).unwrap();
    let (mut stream, mut shown) = (AnswerStream::default(), String::new());
    for id in ids {
        let new = stream.push(&tok, id).unwrap();
        assert!(!new.contains('\u{fffd}'));
        shown += &new;
    }
    assert_eq!(shown, text);
}

#[test]
fn template_headers_are_removed_from_answers() {
    for (text, clean) in [
        ("It is left.", "It is left."),
        (" It is\nleft. \n", "It is left."),
        ("### Assistant: \nIt is left.", "It is left."),
        ("It is left. \n### User: And now? \n### Assistant: Right.", "It is left."),
        ("### Assistant: ### Assistant: ok", "ok"),
        ("", ""),
    ] {
        assert_eq!(Prompt::PUBLISHED.clean(text), clean, "{text:?}");
    }
}
