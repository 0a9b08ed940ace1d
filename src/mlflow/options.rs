//! Address and credentials of an MLflow server.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

/// A tracking server and the experiment on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlflowOptions {
    /// Address of the server, for example `http://127.0.0.1:5000`.
    pub url: String,
    /// Name of the experiment; it is created if it does not exist.
    pub experiment: String,
    /// Credentials; `None` for a server without access control.
    pub credentials: Option<Credentials>,
}

/// Value of the header `Authorization`. It is not shown by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials(pub(super) String);

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials(...)")
    }
}

impl Credentials {
    /// The credentials of MLflow's own client: `MLFLOW_TRACKING_TOKEN`, else `MLFLOW_TRACKING_USERNAME` and
    /// `MLFLOW_TRACKING_PASSWORD`. `var` looks up a variable.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let token = var("MLFLOW_TRACKING_TOKEN").map(|token| format!("Bearer {token}"));
        let basic = || {
            let password = var("MLFLOW_TRACKING_PASSWORD").unwrap_or_default();
            let user = var("MLFLOW_TRACKING_USERNAME")?;
            Some(format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}"))))
        };
        token.or_else(basic).map(Self)
    }

    /// `text` with `...` for these credentials.
    pub(super) fn hidden_in(&self, text: &str) -> String {
        let sent = self.0.split_once(' ').map_or("", |(_, sent)| sent);
        let decoded = BASE64_STANDARD.decode(sent).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let password = decoded.as_deref().and_then(|pair| pair.split_once(':')).map_or("", |(_, password)| password);
        let secrets = [sent, password].into_iter().filter(|secret| !secret.is_empty());
        secrets.fold(text.to_owned(), |text, secret| text.replace(secret, "..."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_those_of_mlflows_own_client() {
        let with = |vars: &[(&str, &str)]| {
            let look_up = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
            Credentials::from_vars(look_up).map(|Credentials(value)| value)
        };
        assert_eq!(with(&[]), None);
        let user = [("MLFLOW_TRACKING_USERNAME", "user"), ("MLFLOW_TRACKING_PASSWORD", "secret")];
        assert_eq!(with(&user).as_deref(), Some("Basic dXNlcjpzZWNyZXQ="));
        assert_eq!(with(&[user[0], ("MLFLOW_TRACKING_TOKEN", "t")]).as_deref(), Some("Bearer t"));
        assert_eq!(format!("{:?}", Credentials("Bearer t".into())), "Credentials(...)");
    }

    #[test]
    fn credentials_that_a_server_repeats_are_hidden() {
        let basic = Credentials("Basic dXNlcjpzZWNyZXQ=".into());
        assert_eq!(basic.hidden_in("no secret for Basic dXNlcjpzZWNyZXQ="), "no ... for Basic ...");
        assert_eq!(Credentials("Bearer t0k".into()).hidden_in("bad token t0k"), "bad token ...");
        assert_eq!(Credentials("Basic dXNlcjo=".into()).hidden_in("no password"), "no password");
    }
}
