use super::*;

fn values(pairs: &[(&str, f64)]) -> Vec<(String, f64)> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

#[test]
fn dice_and_score_have_their_names() {
    let line = best_line(Some(0.7833), &values(&[("dice", 0.58), ("iou", 0.4), ("token_accuracy", 0.9866)]));
    assert_eq!(line, format!("best/: validation Dice 0.5800; score 0.7833 ({SCORE})"));
}

#[test]
fn a_score_without_present_targets_is_no_mean() {
    let line = best_line(Some(0.75), &values(&[("token_accuracy", 0.75), ("false_masks", 0.1)]));
    assert!(line.contains("no Dice") && line.ends_with("score 0.7500 (answer-token accuracy)"), "{line}");
}

#[test]
fn runs_without_validation_or_of_old_versions_claim_no_dice() {
    assert!(best_line(None, &[]).contains("not validated"));
    assert_eq!(best_line(Some(0.5), &[]), format!("best/: score 0.5000 ({SCORE})"));
}
