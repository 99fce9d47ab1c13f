//! Holding keys from a command, and acting on what one holds: shared by the commands that do.
//!
//! [`take`] takes keys, [`in_line`] waits for one, of which [`mention`] tells whoever looks on; a [`claim`] is one that is
//! held and renewed. An attempt that outlives its command is kept by a process of its own (`leasefs hold`): [`binding`] and
//! [`keep`] say how long, [`holder`] starts it and finds it again. [`attempt`] decides which attempt a later command means,
//! and [`identity`] gives it the proofs.

mod alarm;
pub mod attempt;
pub mod binding;
pub mod claim;
pub mod holder;
pub mod identity;
mod in_line;
pub mod keep;
mod mention;
pub mod take;
pub mod time;

use leasefs::agent;

/// Who claims, by a name of its own.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct AgentArgs {
    /// Name of the agent that holds, for `leasefs ls` and for claiming again; each agent needs a name of its own
    #[arg(long, env = "LEASEFS_AGENT", value_name = "NAME", value_parser = agent_name)]
    agent: Option<String>,
}

impl AgentArgs {
    /// The name; an empty one is none.
    pub fn name(&self) -> Option<&str> {
        self.agent.as_deref().filter(|name| !name.is_empty())
    }
}

/// Reads NAME. An empty one is none: so is `LEASEFS_AGENT=` in the environment.
fn agent_name(text: &str) -> Result<String, String> {
    match text.is_empty() {
        true => Ok(String::new()),
        false => agent::name(text.as_bytes()).map(|name| name.to_string()).map_err(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_line_of_text() {
        assert_eq!(agent_name("planner 7").as_deref(), Ok("planner 7"));
        assert!(agent_name("a\nb").is_err() && agent_name(&"x".repeat(256)).is_err());
        assert_eq!(AgentArgs { agent: Some(String::new()) }.name(), None);
    }
}
