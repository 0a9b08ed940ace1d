use super::*;

const MIB: u64 = 1 << 20;

/// A made-up training step: weights, then activations that grow in the forward and shrink in the backward pass.
fn step(layers: usize, events: usize) -> Timeline {
    let names =
        ["frozen", "trainable", "masters", "gradients", "optimizer", "EMA", "inputs", "activations", "workspace"];
    let mut points = Vec::new();
    for layer in 0..2 * layers {
        let (backward, depth) = (layer >= layers, if layer < layers { layer } else { 2 * layers - layer });
        for event in 0..events {
            let workspace = if event % 3 == 1 { 130 * MIB } else { 8 * MIB };
            let gradients = if backward { (layer - layers) as u64 * 2 * MIB } else { 0 };
            let activations = depth as u64 * 190 * MIB + event as u64 % 7 * 30 * MIB;
            points.push(Point {
                bytes: vec![
                    13_800 * MIB,
                    90 * MIB,
                    180 * MIB,
                    gradients,
                    180 * MIB,
                    90 * MIB,
                    40 * MIB,
                    activations,
                    workspace,
                ],
            });
        }
    }
    let at = (0..points.len()).max_by_key(|point| points[*point].total()).unwrap();
    let half = layers * events;
    let op = |name: &str, layer: usize, change: i64| (name.to_string(), format!("llm.layers.{layer}.mlp.down"), change);
    Timeline {
        phases: vec![
            ("load".into(), 0),
            ("forward".into(), events),
            ("backward".into(), half),
            ("optimizer".into(), 2 * half - events),
            ("save".into(), 2 * half - 2),
        ],
        title: "full, micro-batch 4, RTX 4090: memory of the first step".into(),
        budget: Some(24_080 * MIB),
        peak: Peak {
            at,
            ops: vec![
                op("aten::mm", 30, 117_440_512),
                op("aten::silu", 30, 117_440_512),
                ("aten::_scaled_dot_product_flash_attention".into(), "llm.layers.31.attention".into(), 33_554_432),
                op("aten::mm", 31, 469_762_048),
                op("aten::_to_copy", 31, -469_762_048),
            ],
        },
        categories: names.map(String::from).to_vec(),
        points,
    }
}

#[test]
fn columns_keep_every_maximum() {
    let mut timeline = step(32, 400);
    let lonely = 777;
    timeline.points[lonely].bytes[7] += 9_000 * MIB;
    timeline.peak.at = lonely;
    let columns = columns(&timeline);
    assert_eq!(columns.len(), COLUMNS);
    assert!(columns.iter().any(|column| column.highest == lonely));
    let ends = columns.iter().skip(1).map(|column| column.first).chain([timeline.points.len()]);
    for (column, end) in columns.iter().zip(ends) {
        let highest = timeline.points[column.first..end].iter().map(Point::total).max().unwrap();
        assert_eq!(timeline.points[column.highest].total(), highest);
    }
}

#[test]
fn long_traces_make_small_files() {
    let timeline = step(250, 400);
    assert_eq!(timeline.points.len(), 200_000);
    let (picture, page) = (svg(&timeline), html(&timeline));
    assert!(picture.len() < 1_000_000 && page.len() < 1_000_000, "{} {}", picture.len(), page.len());
}

#[test]
fn the_picture_says_what_matters() {
    let timeline = step(32, 20);
    let picture = svg(&timeline);
    let peak = timeline.points[timeline.peak.at].total();
    for text in
        ["GiB", "forward", "backward", "aten::mm", "llm.layers.31.mlp.down", "stroke-dasharray", "budget 23.52 GiB"]
    {
        assert!(picture.contains(text), "{text}");
    }
    assert!(picture.contains(&format!("peak {}", amount(peak))));
    assert!(picture.contains("\u{2212}448.00 MiB") && picture.contains("+448.00 MiB"));
    assert_eq!(picture.matches("<pattern").count(), 9);
    assert!(picture.contains("viewBox") && !picture.contains("NaN") && !picture.contains("inf"));
}

#[test]
fn texts_are_escaped() {
    let mut timeline = step(2, 4);
    timeline.title = "</title><script>alert('1')</script> & \u{1}".into();
    timeline.categories[0] = "a<b & \"c\"".into();
    timeline.categories[1] = "{{picture}}".into();
    timeline.peak.ops[0].0 = "</script>".into();
    for text in [svg(&timeline), html(&timeline)] {
        assert!(!text.contains("<script>alert") && !text.contains('\u{1}'));
        assert!(text.contains("a&lt;b &amp; &quot;c&quot;"));
    }
    let page = html(&timeline);
    assert_eq!(page.matches("</script>").count(), 2);
    assert!(page.contains("prefers-color-scheme: dark") && !page.contains("src="));
    let data = page.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["categories"][0], "a<b & \"c\"");
    assert_eq!(data["points"], 16);
}

#[test]
fn odd_timelines_are_drawn() {
    assert!(svg(&Timeline::default()).contains("no allocations recorded"));
    assert!(html(&Timeline::default()).contains("\"points\":0"));
    let one = Timeline {
        points: vec![Point { bytes: vec![u64::MAX, 5] }],
        categories: vec!["a".into(), "b".into(), "c".into()],
        peak: Peak { at: 99, ops: vec![] },
        budget: Some(1),
        phases: vec![("beyond".into(), 50)],
        ..Timeline::default()
    };
    assert!(svg(&one).contains("over the budget"));
    let small = Timeline { points: vec![Point { bytes: vec![100] }], budget: Some(1 << 40), ..one };
    assert!(svg(&small).contains("budget 1024.00 GiB, far above"));
}

#[test]
fn ticks_are_round() {
    assert_eq!(tick(24.0 * 1_073_741_824.0), (5.0, 1_073_741_824.0, "GiB"));
    assert_eq!(tick(700.0 * 1_048_576.0), (100.0, 1_048_576.0, "MiB"));
    assert_eq!(tick(10.0).2, "B");
}

#[test]
fn many_phases_keep_their_names_apart() {
    let mut timeline = step(32, 20);
    timeline.phases = (0..40).map(|index| (format!("micro-step {index}"), index * 32)).collect();
    let labels = phase_labels(&timeline);
    assert!(labels.len() > 10 && labels.len() < 40);
    for (index, label) in labels.iter().enumerate() {
        for other in &labels[index + 1..] {
            let apart = label.x + width(label.name, 13.0) <= other.x;
            assert!(label.row != other.row || apart, "{} {}", label.name, other.name);
        }
    }
}
